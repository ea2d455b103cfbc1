"""Authentication: bearer keys, admin routes, callers that a router names, and protection of local
servers against web pages.

Keys are looked up as SHA-256 digests. Nothing here can print a key. A file of keys
is read again when it changes:

    keys:
      - name: research        # its cache, files and sessions stay its own when its keys change
        key: [sk-new, sk-old]
        weight: 2             # share of the steps while others wait; default 1
        max-requests: 16      # at once, more get 429; 0 = no limit
"""

import contextlib
import hashlib
import hmac
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import ConfigError, RequestError
from banyan.base.log import logger, printable
from banyan.base.os import is_loopback
from banyan.config.argv import read_plain_mapping

log = logger(__name__)

LOOK_S = 1.0
"""How often the file is checked while requests arrive."""
MAX_CALLERS = 10_000
_LEAST = 0.001
"""Weights are between this and its inverse."""
_FIELDS = ("name", "key", "weight", "max-requests")


def digest(key: str | bytes) -> bytes:
    return hashlib.sha256(key if isinstance(key, bytes) else key.encode()).digest()


@dataclass(frozen=True)
class Caller:
    """The owner of one or more keys.

    Attributes:
        tenant: digest of the name, or of the key if there is no name.
        weight: share of the steps, relative to other callers.
        max_requests: most open requests; 0 = no limit.
    """

    tenant: bytes
    name: str = ""
    weight: float = 1.0
    max_requests: int = 0


ANYONE = Caller(b"")
"""The caller on a server without keys."""


def in_thread(work: Callable[[], None]) -> None:
    """Run `work` next to the event loop."""
    threading.Thread(target=work, name="keys", daemon=True).start()


class Keys:
    """The keys of a server.

    Args:
        given: keys without names, separated by spaces.
        path: key file; "" = none.
        run: runs the reading of a changed file; the keys stay as they were until it is done.

    Raises:
        ConfigError: the file is missing or malformed.
    """

    def __init__(
        self,
        given: str = "",
        path: str = "",
        clock: Clock | None = None,
        run: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        self._run = run
        self._given = {key: Caller(key) for key in map(digest, given.split())}
        self._path = path
        self._clock = clock or WallClock()
        self._looked_s = self._clock.now()
        self._seen = _state_of(path) if path else None
        self._named: Mapping[bytes, Caller] = {}
        self._weights: Mapping[bytes, float] = {}
        self._names: Mapping[bytes, str] = {}
        self._open: Counter[bytes] = Counter()
        """Open requests by tenant, over all listeners."""
        if path:
            self._take(_read(path))

    def __len__(self) -> int:
        return len(self._given) + len(self._named)

    @property
    def only_key(self) -> bytes:
        """Digest of the single key, which is the admin key too; b"" if there is none or several."""
        return next(iter(self._given)) if len(self._given) == 1 and not self._path else b""

    @property
    def are_required(self) -> bool:
        """Whether requests need a key. An empty key file admits nobody."""
        return bool(self._given or self._path)

    @contextlib.contextmanager
    def counted(self, caller: Caller) -> Iterator[None]:
        """Count a request of `caller` as open for the block.

        Raises:
            RequestError: 429; the caller has as many open requests as it may have.
        """
        number = self._open[caller.tenant]
        if caller.max_requests and number >= caller.max_requests:
            raise RequestError(
                f"{number} requests of this key are open; it may have {caller.max_requests} at "
                "once",
                status=429,
                code="too_many_requests",
                hint="Send it again when one of them has ended",
            )
        self._open[caller.tenant] += 1
        try:
            yield
        finally:
            self._open[caller.tenant] -= 1
            if not self._open[caller.tenant]:
                del self._open[caller.tenant]

    def find(self, given: bytes) -> Caller | None:
        """The caller whose key has this digest; None if there is none.

        Nothing of a key can be learnt from the time that this takes: what is looked up are digests,
        and nobody can choose a key by the bytes of its digest.
        """
        self._refresh()
        return self._named.get(given) or self._given.get(given)

    def weight_of(self, tenant: bytes) -> float:
        return self._weights.get(tenant, 1.0)

    def name_of(self, tenant: bytes) -> str:
        """The name in the key file; "" = the caller has none."""
        return self._names.get(tenant, "")

    def _take(self, named: Mapping[bytes, Caller]) -> None:
        self._named = named
        self._names = {caller.tenant: caller.name for caller in named.values()}
        self._weights = {caller.tenant: caller.weight for caller in named.values()}

    def _refresh(self) -> None:
        """Have the file read again if it has changed."""
        now = self._clock.now()
        if not self._path or now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        state = _state_of(self._path)
        if state == self._seen:
            return
        self._seen = state
        self._run(self._reload)

    def _reload(self) -> None:
        """Read the file. A malformed file is logged and changes nothing."""
        try:
            self._take(_read(self._path))
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)
        else:
            log.info("read %d keys from %s", len(self._named), printable(self._path, 200))


def _state_of(path: str) -> tuple[int, int, int] | None:
    """Identity of a version of a file; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def _read(path: str) -> Mapping[bytes, Caller]:
    """Digest of each key -> its caller."""
    content = read_plain_mapping(path, "--api-key-file")
    listed = content.get("keys")
    if set(content) != {"keys"} or not isinstance(listed, list):
        raise ConfigError(f"{path} must have one entry, keys: a list of callers")
    callers = cast(list[object], listed)
    if len(callers) > MAX_CALLERS:
        raise ConfigError(f"{path} has {len(callers)} callers; at most {MAX_CALLERS} are taken")
    found: dict[bytes, Caller] = {}
    names: set[str] = set()
    for number, entry in enumerate(callers, 1):
        caller, keys = _caller(entry, f"{path}: caller {number}")
        if caller.name in names:
            raise ConfigError(f"{path} has the name {printable(caller.name, 80)!r} twice")
        names.add(caller.name)
        for key in keys:
            if key in found:
                raise ConfigError(f"{path}: caller {number} has a key of another one")
            found[key] = caller
    return found


def _caller(entry: object, place: str) -> tuple[Caller, list[bytes]]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{place} must be a mapping with name and key")
    fields = cast(dict[object, object], entry)
    if unknown := [name for name in fields if name not in _FIELDS]:
        what = printable(str(unknown[0]), 40)
        raise ConfigError(f"{place} has no {what!r}", hint=f"Fields are {', '.join(_FIELDS)}")
    name, given = fields.get("name"), fields.get("key")
    keys = cast(list[object], given) if isinstance(given, list) else [given]
    if not isinstance(name, str) or not name or len(name) > 200:
        raise ConfigError(f"{place} needs a name of at most 200 characters")
    if not keys or not all(isinstance(key, str) and key and " " not in key for key in keys):
        raise ConfigError(f"{place} needs a key: a text without spaces, or a list of such texts")
    weight, most = fields.get("weight", 1), fields.get("max-requests", 0)
    if type(weight) not in (int, float) or not _LEAST <= cast(float, weight) <= 1 / _LEAST:
        raise ConfigError(f"{place}: weight must be in [{_LEAST:g}, {1 / _LEAST:g}]")
    if type(most) is not int or most < 0:
        raise ConfigError(f"{place}: max-requests must be 0 or more")
    caller = Caller(digest(f"name {name}"), name, float(cast(float, weight)), most)
    return caller, [digest(key) for key in cast(list[str], keys)]


OPEN = "open"
"""Guard of routes without a key: health and metrics."""
KEY = "key"
ADMIN = "admin"
OWN = "own"
"""Guard of routes about the caller's own requests: any key, or the admin key."""

UNAUTHORIZED = 401
ANY = "*"
"""Any host or origin."""

TENANT = "x-banyan-tenant"
"""Header of a router: the caller of a request, signed."""
SIGNATURE_S = 300.0
"""How long a signature holds; clocks of router and server may differ by as much."""

_OWN_SITES = ("", "none", "same-origin")
"""Sec-Fetch-Site of programs, of typed addresses, and of the server's own pages."""


@dataclass(frozen=True)
class Verdict:
    """The result of a check: `status` 200 admits the request of `caller`."""

    status: int
    text: str = ""
    caller: Caller = ANYONE
    is_admin: bool = False
    """The caller may abort the requests of others."""


_is_loopback = lru_cache(256)(is_loopback)
"""Remembers the addresses and names of the latest requests."""


class Guard:
    """Decides by route guard, key and peer.

    Args:
        keys: keys of callers. A caller sees nothing of the others.
        admin_key: "" = none; a single API key is then the admin key too.
        host: address that the server is bound to.
        hosts: further names for the header Host, separated by commas; "*" = any.
        origins: web pages that may send requests, such as "http://app.example:3000", separated by
            commas; "*" = any.

    Raises:
        ConfigError: an entry of `origins` is not an origin.
    """

    def __init__(
        self,
        keys: Keys,
        admin_key: str,
        host: str,
        hosts: str = "",
        origins: str = "",
    ) -> None:
        self._keys = keys
        self._admin = digest(admin_key) if admin_key else keys.only_key
        self._is_local = is_loopback(host)
        own = {"localhost", "127.0.0.1", "[::1]", host.lower(), f"[{host}]"}
        self._hosts = frozenset(own | {_bare(name) for name in _parts(hosts)})
        self._checks_hosts = (self._is_local or bool(hosts)) and ANY not in _parts(hosts)
        self._origins = frozenset(map(_checked_origin, _parts(origins)))

    def check_origin(self, host: str, origin: str, site: str) -> str:
        """Refuse requests that foreign web pages make a browser send.

        A server with a key needs no such check, because a page does not have the key. A server on
        loopback is checked anyway.

        Args:
            host, origin, site: the headers Host, Origin and Sec-Fetch-Site; "" = absent. Browsers
                send the last one with every request, even without Origin.

        Returns:
            The origin if its pages may read the answer; "" otherwise.

        Raises:
            RequestError: 421 for an unknown host, 403 for a foreign page.
        """
        if self._checks_hosts and host and _bare(host) not in self._hosts:
            raise RequestError(
                "this server answers to its own names only",
                status=421,
                code="unknown_host",
                hint="Call it as localhost or 127.0.0.1, or start it with this name in "
                "--allowed-hosts",
            )
        if origin and (ANY in self._origins or origin.lower() in self._origins):
            return origin
        if self._keys.are_required and not self._is_local:
            return ""
        own = self._hosts if self._is_local else (_bare(host),)
        if _bare(origin.partition("://")[2]) in own if origin else site in _OWN_SITES:
            return ""
        raise RequestError(
            "web pages of other origins may not call a server without a key, or a local one",
            status=403,
            code="foreign_origin",
            hint="Start it with the origin of the page in --allowed-origins",
        )

    def judge(
        self, guard: str, authorization: bytes, peer: str, host: str, page: str = ""
    ) -> Verdict:
        """Decide whether a request with this Authorization header may use a route with this guard.

        Without keys, admin routes serve this machine only: `peer` must be local, the header `host`
        a loopback name (not a name that a page has pointed here), and there must be no foreign
        `page` (`check_origin`).
        """
        if guard == OPEN:
            return Verdict(200)
        if not self._keys.are_required and not self._admin:
            is_near = self._is_local or _is_loopback(peer)
            is_admin = is_near and (not host or _is_loopback(_bare(host))) and not page
            if guard == ADMIN and not is_admin:
                return Verdict(403, "admin routes need a key here: start with --admin-api-key")
            return Verdict(200, is_admin=is_admin)
        scheme, _, token = authorization.partition(b" ")
        given = digest(token.strip()) if scheme.lower() == b"bearer" else b""
        caller = self._keys.find(given)
        is_admin = bool(self._admin) and hmac.compare_digest(given, self._admin)
        if guard == ADMIN and caller is not None and not self._admin:
            return Verdict(403, "with several keys admin routes need one: --admin-api-key")
        fits = caller is not None or not self._keys.are_required
        if guard == ADMIN or (guard == OWN and is_admin):
            fits = is_admin
        if not fits:
            return Verdict(UNAUTHORIZED)
        if caller is None:
            caller = Caller(given) if self._keys.are_required else ANYONE
        return Verdict(200, "", caller, is_admin)


class TenantSigner:
    """Signs the caller of a request that a router forwards, and checks that at the server.

    A router may use a key of its own for a server. The server then cannot distinguish callers by
    their keys, so it takes the caller from the header `TENANT`, if the signature is valid.

    Args:
        secret: known to the router and its servers (BANYAN_DIST_SECRET).
        now: seconds of the epoch.
    """

    def __init__(self, secret: str, now: Callable[[], float] = time.time) -> None:
        self._key = hashlib.sha256(f"{TENANT} {secret}".encode()).digest()
        self._now = now

    def sign(self, tenant: bytes, is_admin: bool, method: str, path: str) -> str:
        """The value of the header for a request of this method to this path, without its query."""
        text = f"{tenant.hex()}.{int(is_admin)}.{int(self._now())}"
        return f"{text}.{self._mac(text, method, path)}"

    def read(self, value: str, verdict: Verdict, method: str, path: str) -> Verdict:
        """`verdict` on the request of a router, for the caller that its header names.

        The caller is an administrator only if the router says so and its key allows it. A header
        that was signed for another method or path is refused.

        Raises:
            RequestError: 401; the signature is not valid, or not any more.
        """
        text, _, mac = value.rpartition(".")
        tenant, is_admin, time_s, *_ = (*text.split("."), "", "", "")
        is_valid = hmac.compare_digest(mac.encode(), self._mac(text, method, path).encode())
        if not is_valid or abs(self._now() - int(time_s)) > SIGNATURE_S:
            raise RequestError(
                f"the header {TENANT} has no valid signature",
                status=401,
                code="invalid_tenant",
                hint="Set BANYAN_DIST_SECRET to the same text for the router and its servers, and "
                "their clocks to the same time",
            )
        caller = replace(verdict.caller, tenant=bytes.fromhex(tenant))
        return replace(verdict, caller=caller, is_admin=verdict.is_admin and is_admin == "1")

    def _mac(self, text: str, method: str, path: str) -> str:
        signed = f"{text} {method} {path}".encode("utf-8", "surrogatepass")
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest()


def open_signer(secret: str) -> TenantSigner | None:
    """None without a secret: the header `TENANT` is then neither sent nor trusted."""
    return TenantSigner(secret) if secret else None


def _parts(given: str) -> list[str]:
    return [part.strip() for part in given.split(",") if part.strip()]


def _checked_origin(given: str) -> str:
    """An origin in the form that browsers send; ConfigError if it is none."""
    origin = given.lower().rstrip("/")
    scheme, mark, rest = origin.partition("://")
    if given not in (ANY, "null") and not (scheme and mark and rest and "/" not in rest):
        raise ConfigError(
            f"--allowed-origins {printable(given, 80)!r} is no origin",
            hint=f"Give them as http://app.example:3000, or {ANY!r} for all",
        )
    return origin


def _bare(host: str) -> str:
    """The host without its port, in lower case."""
    host = host.lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
