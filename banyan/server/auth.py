"""Who may call what: bearer keys, admin routes, and protection of local servers against browsers.

Keys are compared as SHA-256 digests in constant time; nothing here can print a key.
"""

import hashlib
import hmac
from dataclasses import dataclass
from ipaddress import ip_address

from banyan.base.errors import RequestError

OPEN = "open"
"""Guard of routes that answer without a key: health and metrics."""
KEY = "key"
ADMIN = "admin"

UNAUTHORIZED = 401


def _digest(key: str | bytes) -> bytes:
    return hashlib.sha256(key if isinstance(key, bytes) else key.encode()).digest()


def is_loopback(host: str) -> bool:
    """Whether an address or name stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Verdict:
    """`status` 200 admits. `tenant` is the digest of the key presented, b"" without keys."""

    status: int
    text: str = ""
    tenant: bytes = b""


class Guard:
    """Decides by route guard, key and peer.

    Args:
        api_key, admin_key: "" for none.
        host: the address that the server is bound to.
    """

    def __init__(self, api_key: str, admin_key: str, host: str) -> None:
        self._api = _digest(api_key) if api_key else b""
        self._admin = _digest(admin_key) if admin_key else b""
        self._is_local = is_loopback(host)
        self._hosts = frozenset({"localhost", "127.0.0.1", "[::1]", host.lower(), f"[{host}]"})

    def check_origin(self, host: str, origin: str) -> None:
        """Refuse DNS rebinding and foreign web pages on loopback binds: RequestError 421, 403."""
        if not self._is_local:
            return
        if host and _bare(host) not in self._hosts:
            raise RequestError(
                "this server answers to its own names only",
                status=421,
                code="unknown_host",
                hint="Call it as localhost or 127.0.0.1, or bind another --host",
            )
        if origin and origin != "null" and _bare(origin.partition("://")[2]) in self._hosts:
            return
        if origin:
            raise RequestError(
                "web pages of other origins may not call a local server",
                status=403,
                code="foreign_origin",
            )

    def judge(self, guard: str, authorization: bytes, peer: str) -> Verdict:
        """Whether a request with this Authorization header may use a route with this guard."""
        if guard == OPEN:
            return Verdict(200)
        scheme, _, token = authorization.partition(b" ")
        given = _digest(token.strip()) if scheme.lower() == b"bearer" else b""
        wanted = self._admin or self._api if guard == ADMIN else self._api
        if wanted:
            fits = hmac.compare_digest(given, wanted)
            return Verdict(200, tenant=given) if fits else Verdict(UNAUTHORIZED)
        if guard == ADMIN and not self._is_local and not is_loopback(peer):
            return Verdict(403, "admin routes need a key here: start with --admin-api-key")
        return Verdict(200)


def _bare(host: str) -> str:
    """Host header without its port, in lower case."""
    host = host.lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
