"""The files of the console: the page at `/` and everything that it loads.

They contain nothing of this server, so they need no key. The console gets its data from the routes,
with the key of its user. `vendor/` holds libraries of the npm registry as their authors built them;
`vendor/vendored.tsv` lists the files with licence and SHA-256.
"""

import gzip
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from importlib.resources.abc import Traversable

from banyan.base.errors import RequestError
from banyan.base.log import printable
from banyan.server.http import auth
from banyan.server.http.exchange import HttpExchange
from banyan.server.http.route import Route
from banyan.server.state import ServerState

FOLDER = "console/"
"""Path of the files, below the page."""

VENDOR = "vendor/"
"""Below FOLDER. The folders in it have a version in their name, so that browsers may keep them."""

_KINDS = {
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
    ".woff2": "font/woff2",
}
_PACKAGE = "banyan.server.console"
_SHELL = "index.html"
_MARK = "<!-- without scripts -->"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
"""Allows scripts and requests of this server only; only what DOMPurify sanitized becomes markup."""

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
    keep: str
    """Value of cache-control."""

    @cached_property
    def packed(self) -> bytes:
        """The body as gzip; the body itself if that would not make it smaller."""
        packed = gzip.compress(self.body, 6, mtime=0)
        return packed if len(packed) < 0.9 * len(self.body) else self.body


def console_routes() -> list[Route]:
    below = {"{file}": ("GET",)}
    about = "Static file of the console"
    return [Route(f"/{FOLDER}", ("GET",), show_file, auth.OPEN, about=about, below=below)]


async def show_file(exchange: HttpExchange, state: ServerState) -> None:
    file = files().get(exchange.request.tail)
    if file is None:
        name = printable(exchange.request.tail, 60)
        raise RequestError(f"the console has no file {name}", status=404, code="not_found")
    headers = {**HEADERS, "etag": file.tag, "cache-control": file.keep, "vary": "accept-encoding"}
    if exchange.request.header(b"if-none-match") == file.tag:
        await exchange.whole(b"", 304, file.kind, headers)
        return
    body = file.body
    if "gzip" in exchange.request.header(b"accept-encoding") and file.packed is not body:
        body, headers["content-encoding"] = file.packed, "gzip"
    await exchange.whole(body, 200, file.kind, headers)


def shell(plain: str) -> bytes:
    """The page that loads the console.

    Args:
        plain: markup for browsers without scripts.
    """
    return _shell().replace(_MARK, plain, 1).encode()


@cache
def files() -> Mapping[str, File]:
    """Every file of the console by its path below FOLDER."""
    return dict(_files(resources.files(_PACKAGE), ""))


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, File]]:
    for entry in folder.iterdir():
        path = prefix + entry.name
        if entry.is_dir():
            yield from _files(entry, path + "/")
            continue
        kind = _KINDS.get(entry.name[entry.name.rfind(".") :])
        if kind is not None:
            body = entry.read_bytes()
            tag = f'W/"{hashlib.sha256(body).hexdigest()[:20]}"'
            is_kept = path.startswith(VENDOR)
            keep = "public, max-age=31536000, immutable" if is_kept else "no-cache"
            yield path, File(body, kind, tag, keep)


@cache
def _shell() -> str:
    text = resources.files(_PACKAGE).joinpath(_SHELL).read_text(encoding="utf-8")
    assert text.count(_MARK) == 1
    return text
