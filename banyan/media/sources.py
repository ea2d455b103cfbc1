"""Where the bytes of a picture come from: https and http URLs, and local files where allowed.

The URL is a stranger's. A host is resolved once, and only a checked address is dialled. Addresses
that are not public are refused, unless --allowed-media-domains names the host; each redirect is
checked in the same way. Neither a proxy nor cookies of the environment are used. Size and time are
bounded.
"""

import asyncio
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from urllib.parse import unquote, urljoin, urlsplit

import httptools

from banyan.base.errors import RequestError

MAX_REDIRECTS = 5
MAX_URL_CHARS = 8192
_CHUNK = 1 << 16
_MAX_HEAD = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Host and port -> its addresses."""


@dataclass(frozen=True)
class SourceLimits:
    """What may be fetched.

    Attributes:
        max_bytes: of one file.
        domains: the only hosts that are fetched from, which then may have any address; () = every
            host with a public address.
        folder: real path of the folder whose files may be read; "" = none.
    """

    max_bytes: int
    domains: tuple[str, ...] = ()
    folder: str = ""


async def fetch(
    url: str, limits: SourceLimits, param: str, resolve: Resolve | None = None
) -> bytes:
    """The bytes at a URL. The caller bounds the time.

    Args:
        param: the field that brings the URL, for errors.

    Raises:
        RequestError: 400; the URL is not allowed, or gives no file.
    """
    refuse = _Refusal(param)
    if len(url) > MAX_URL_CHARS:
        raise refuse(f"the URL has {len(url):,} characters, limit {MAX_URL_CHARS:,}")
    if url[:5].lower() == "file:":
        return await asyncio.to_thread(_read_file, url, limits, refuse)
    for _ in range(MAX_REDIRECTS + 1):
        answer = await _get(url, limits, refuse, resolve or _resolve)
        if answer.status not in _REDIRECTS:
            break
        target = answer.headers.get("location", "")
        if not target or len(target) > MAX_URL_CHARS:
            raise refuse(f"status {answer.status} without a usable location")
        url = urljoin(url, target)
    else:
        raise refuse(f"more than {MAX_REDIRECTS} redirects")
    if answer.status != 200:
        raise refuse(f"the host answers with status {answer.status}")
    return bytes(answer.body)


class _Refusal:
    """Makes the errors of one URL."""

    def __init__(self, param: str) -> None:
        self._param = param

    def __call__(self, why: str, hint: str = "") -> RequestError:
        return RequestError(
            f"{self._param}: the picture cannot be fetched: {why}",
            param="messages",
            code="media_not_fetched",
            hint=hint or "Send it as a data URL",
        )


@dataclass
class _Answer:
    """Callbacks of the parser, and what they found."""

    limits: SourceLimits
    refuse: _Refusal
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytearray = field(default_factory=bytearray)
    is_whole: bool = False
    _head_bytes: int = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _MAX_HEAD:
            raise self.refuse(f"its headers have more than {_MAX_HEAD:,} bytes")
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body
        self.check_size(len(self.body))

    def on_message_complete(self) -> None:
        self.is_whole = True

    def check_size(self, size: int) -> None:
        most = self.limits.max_bytes
        if size > most:
            raise self.refuse(
                f"it has more than {most >> 20} MB",
                "Send a smaller file, or start with a larger --media-url-max-file-size-mb",
            )


async def _get(url: str, limits: SourceLimits, refuse: _Refusal, resolve: Resolve) -> _Answer:
    """One GET of an http or https URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("ascii")
    except (ValueError, UnicodeEncodeError):
        raise refuse("its URL is malformed") from None
    if parts.scheme.lower() not in ("http", "https"):
        raise refuse(f"its URL begins with {parts.scheme[:20]}:, and only http and https are taken")
    if not host or parts.username is not None or parts.password is not None:
        raise refuse("its URL has no host, or has a user name")
    is_secure = parts.scheme.lower() == "https"
    port = port or (443 if is_secure else 80)
    address = await _checked_address(host, port, limits.domains, refuse, resolve)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if any(not 0x21 <= ord(c) <= 0x7E for c in target):
        raise refuse("its URL has characters that must be escaped")
    shown = f"[{host}]" if ":" in host else host
    standard = port == (443 if is_secure else 80)
    request = (
        f"GET {target} HTTP/1.1\r\nHost: {shown}{'' if standard else f':{port}'}\r\n"
        "Accept: image/*, */*;q=0.5\r\nAccept-Encoding: identity\r\nUser-Agent: banyan\r\n"
        "Connection: close\r\n\r\n"
    )
    secure = ssl.create_default_context() if is_secure else None
    try:
        reader, writer = await asyncio.open_connection(
            address, port, ssl=secure, server_hostname=host if is_secure else None
        )
    except (OSError, ssl.SSLError) as error:
        raise refuse(f"no connection to {host}:{port}: {_short(error)}") from None
    try:
        writer.write(request.encode("ascii"))
        return await _read_answer(reader, _Answer(limits, refuse), refuse)
    except (OSError, ssl.SSLError) as error:
        raise refuse(f"the connection broke: {_short(error)}") from None
    finally:
        writer.transport.abort()


async def _read_answer(reader: asyncio.StreamReader, answer: _Answer, refuse: _Refusal) -> _Answer:
    parser = httptools.HttpResponseParser(answer)
    num_bytes = 0
    while not answer.is_whole:
        data = await reader.read(_CHUNK)
        num_bytes += len(data)
        if not answer.body and num_bytes > _MAX_HEAD + _CHUNK:
            raise refuse(f"its headers have more than {_MAX_HEAD:,} bytes")
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, RequestError):
                raise cause from None
            raise refuse("it answers with something that is not HTTP") from None
        answer.status = parser.get_status_code() if answer.headers else answer.status
        length = answer.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and len(length) < 20:
            answer.check_size(int(length))
        if answer.status in _REDIRECTS:
            return answer
        if not data:
            if (
                not answer.status
                or length
                or "chunked" in answer.headers.get("transfer-encoding", "")
            ):
                raise refuse("the connection ended early")
            return answer  # a body that ends with the connection
    return answer


async def _checked_address(
    host: str, port: int, domains: Collection[str], refuse: _Refusal, resolve: Resolve
) -> str:
    """The address to dial. Nothing resolves the name a second time."""
    if domains and host.lower().rstrip(".") not in domains:
        raise refuse(
            f"--allowed-media-domains does not name {host[:80]!r}",
            "Ask the operator, or send it as a data URL",
        )
    try:
        addresses = await resolve(host, port)
    except OSError as error:
        raise refuse(f"the host {host[:80]!r} is not found ({_short(error)})") from None
    for address in addresses:
        if domains or is_public(address):
            return address
    raise refuse(
        f"the host {host[:80]!r} has no public address",
        "The operator may name it in --allowed-media-domains",
    )


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(text: str) -> bool:
    """Whether an address is in the public internet, also where one hides inside another."""
    try:
        address: Address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner: Address | None = address.ipv4_mapped or address.sixtofour
        if inner is None and address.teredo:
            inner = address.teredo[1]
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _read_file(url: str, limits: SourceLimits, refuse: _Refusal) -> bytes:
    if not limits.folder:
        raise refuse(
            "files of the server are not read", "The operator may allow a folder of pictures"
        )
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or "\0" in url or "%00" in url:
        raise refuse("its file: URL is malformed")
    try:
        descriptor = os.open(unquote(parts.path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise refuse(f"{_short(error)}") from None
    try:
        # The path of what is open now: a link that changes meanwhile does not matter.
        real = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.commonpath([real, limits.folder]) != limits.folder:
            raise refuse("the file is outside of the allowed folder")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise refuse("it is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(limits.max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > limits.max_bytes:
        raise refuse(f"the file has more than {limits.max_bytes >> 20} MB")
    return data


def _short(error: BaseException) -> str:
    """The system's reason, without paths."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join((text or type(error).__name__).split())[:120]
