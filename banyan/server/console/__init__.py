"""The files of the console: the page at `/` and everything that it loads.

They contain nothing of this server, so they need no key. The console gets its data from the routes,
with the key of its user.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from banyan.base.errors import RequestError
from banyan.base.log import printable
from banyan.server.http import auth
from banyan.server.http.exchange import HttpExchange
from banyan.server.http.route import Route
from banyan.server.state import ServerState

FOLDER = "console/"
"""Path of the files, below the page."""

_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_PACKAGE = "banyan.server.console"
_SHELL = "index.html"
_MARK = "<!-- without scripts -->"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Allows scripts and requests of this server only; text never becomes markup."""

HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True)
class File:
    body: bytes
    kind: str
    tag: str
    """Changes with the body."""


def console_routes() -> list[Route]:
    below = {"{file}": ("GET",)}
    about = "Static file of the console"
    return [Route(f"/{FOLDER}", ("GET",), show_file, auth.OPEN, about=about, below=below)]


async def show_file(exchange: HttpExchange, state: ServerState) -> None:
    file = files().get(exchange.request.tail)
    if file is None:
        name = printable(exchange.request.tail, 60)
        raise RequestError(f"the console has no file {name}", status=404, code="not_found")
    headers = {**HEADERS, "etag": file.tag, "cache-control": "no-cache"}
    is_known = exchange.request.header(b"if-none-match") == file.tag
    body, status = (b"", 304) if is_known else (file.body, 200)
    await exchange.whole(body, status, file.kind, headers)


def shell(plain: str) -> bytes:
    """The page that loads the console.

    Args:
        plain: markup for browsers without scripts.
    """
    return _shell().replace(_MARK, plain, 1).encode()


@cache
def files() -> Mapping[str, File]:
    """Every file of the console by name."""
    found: dict[str, File] = {}
    for entry in resources.files(_PACKAGE).iterdir():
        kind = _KINDS.get(entry.name[entry.name.rfind(".") :])
        if kind is not None:
            body = entry.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
            found[entry.name] = File(body, f"{kind}; charset=utf-8", tag)
    return found


@cache
def _shell() -> str:
    text = resources.files(_PACKAGE).joinpath(_SHELL).read_text(encoding="utf-8")
    assert text.count(_MARK) == 1
    return text
