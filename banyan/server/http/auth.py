"""Who may call what: bearer keys, admin routes, and protection of local servers against browsers.

Keys are compared as SHA-256 digests in constant time; nothing here can print a key.
"""

import hmac
from dataclasses import dataclass

from banyan.base.errors import ConfigError, RequestError
from banyan.base.hosts import is_loopback
from banyan.base.log import printable
from banyan.server.http.api_keys import ANYONE, Caller, Keys, digest

OPEN = "open"
"""Guard of routes that answer without a key: health and metrics."""
KEY = "key"
ADMIN = "admin"
OWN = "own"
"""Guard of routes on what callers have made themselves: any key, the administrator's too."""

UNAUTHORIZED = 401
ANY = "*"
"""In the place of hosts or origins."""

_OWN_SITES = ("", "none", "same-origin")
"""Sec-Fetch-Site of programs, of a person who types an address, and of the server's own pages."""


@dataclass(frozen=True)
class Verdict:
    """`status` 200 admits. `caller` is whose key was presented."""

    status: int
    text: str = ""
    caller: Caller = ANYONE
    is_admin: bool = False
    """What others have made may be ended."""


class Guard:
    """Decides by route guard, key and peer.

    Args:
        keys: of callers. Who has one sees nothing of the others.
        admin_key: "" for none: then the only API key is the administrator's too.
        host: the address that the server is bound to.
        hosts: other names in the header Host, with commas; "*" = any.
        origins: of web pages that may ask, "http://app.example:3000", with commas; "*" = any.

    Raises:
        ConfigError: one of `origins` is none.
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
        self._admin = digest(admin_key) if admin_key else keys.only
        self._is_local = is_loopback(host)
        own = {"localhost", "127.0.0.1", "[::1]", host.lower(), f"[{host}]"}
        self._hosts = frozenset(own | {_bare(name) for name in _parts(hosts)})
        self._checks_hosts = (self._is_local or bool(hosts)) and ANY not in _parts(hosts)
        self._origins = frozenset(map(_checked_origin, _parts(origins)))

    def check_origin(self, host: str, origin: str, site: str) -> str:
        """Refuse what web pages of others make a browser ask: RequestError 421, 403.

        With a key a page gets no further, because it does not know the key; on loopback it is
        turned away all the same.

        Returns:
            The origin, where its pages may ask and read what is answered; "" otherwise.

        Args:
            host, origin, site: the headers Host, Origin and Sec-Fetch-Site, "" for none. Browsers
                send the last with every request, also with those that have no Origin.
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
        if self._keys.are_asked_for and not self._is_local:
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
        """Whether a request with this Authorization header may use a route with this guard.

        Without a key admin routes are for this machine: for a `peer` on it that calls the server by
        a loopback name in the header `host`. A page's own name, made to point here, is none, and
        no `page` of others (`check_origin`) gets there.
        """
        if guard == OPEN:
            return Verdict(200)
        if not self._keys.are_asked_for and not self._admin:
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
        fits = caller is not None or not self._keys.are_asked_for
        if guard == ADMIN or (guard == OWN and is_admin):
            fits = is_admin
        if not fits:
            return Verdict(UNAUTHORIZED)
        if caller is None:
            caller = Caller(given) if self._keys.are_asked_for else ANYONE
        return Verdict(200, "", caller, is_admin)


def _parts(given: str) -> list[str]:
    return [part.strip() for part in given.split(",") if part.strip()]


def _checked_origin(given: str) -> str:
    """An origin as browsers write it."""
    origin = given.lower().rstrip("/")
    scheme, mark, rest = origin.partition("://")
    if given not in (ANY, "null") and not (scheme and mark and rest and "/" not in rest):
        raise ConfigError(
            f"--allowed-origins {printable(given, 80)!r} is no origin",
            hint=f"Give them as http://app.example:3000, or {ANY!r} for all",
        )
    return origin


def _bare(host: str) -> str:
    """Host header without its port, in lower case."""
    host = host.lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
