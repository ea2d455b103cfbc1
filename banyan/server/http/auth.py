"""Authentication: bearer keys, admin routes, callers that a router names, and protection of local
servers against web pages.

Keys are looked up as SHA-256 digests. Nothing here can print a key.
"""

import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from banyan.base.errors import ConfigError, RequestError
from banyan.base.log import printable
from banyan.base.os import is_loopback
from banyan.server.http.api_keys import ANYONE, Caller, Keys, digest

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
            is_near = self._is_local or is_loopback(peer)
            is_admin = is_near and (not host or is_loopback(_bare(host))) and not page
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

    def sign(self, tenant: bytes, is_admin: bool) -> str:
        """The value of the header."""
        text = f"{tenant.hex()}.{int(is_admin)}.{int(self._now())}"
        return f"{text}.{self._mac(text)}"

    def read(self, value: str, verdict: Verdict) -> Verdict:
        """`verdict` on the request of a router, for the caller that its header names.

        The caller is an administrator only if the router says so and its key allows it.

        Raises:
            RequestError: 401; the signature is not valid, or not any more.
        """
        text, _, mac = value.rpartition(".")
        tenant, is_admin, time_s, *_ = (*text.split("."), "", "", "")
        is_valid = hmac.compare_digest(mac.encode(), self._mac(text).encode())
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

    def _mac(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


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
