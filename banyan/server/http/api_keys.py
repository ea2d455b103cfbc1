"""API keys: the ones of --api-key, and the ones of a file that is read again when it changes.

    keys:
      - name: research        # its cache, files and sessions stay its own when its keys change
        key: [sk-new, sk-old]
        weight: 2             # share of the steps while others wait; default 1
        max-requests: 16      # at once, more get 429; 0 = no limit

Keys are stored as SHA-256 digests and compared in constant time. Nothing here can print a key.
"""

import contextlib
import hashlib
import hmac
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import ConfigError, RequestError
from banyan.base.log import logger, printable
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
        """The caller whose key has this digest. A wrong key takes as long."""
        self._refresh()
        found: Caller | None = None
        for keys in (self._given, self._named):
            for key, caller in keys.items():
                if hmac.compare_digest(given, key):
                    found = caller
        return found

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
