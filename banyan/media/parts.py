"""Parts of messages that are pictures, sound, video or files, in the forms that clients use.

`read_part` makes a `MediaPart` of one part of OpenAI's API, into which the other APIs are
translated. Nothing is fetched or decoded here.
"""

import base64
import hashlib
import re
import string
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import quote

import msgspec

from banyan.base.errors import RequestError
from banyan.base.json_types import is_object, whole_number

IMAGE, AUDIO, VIDEO, FILE = "image", "audio", "video", "file"

MEDIA_TYPES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "image_url": (IMAGE, ("image_url", "url")),
    "input_image": (IMAGE, ("image_url", "url")),
    "image": (IMAGE, ("image", "image_url", "url")),
    "video_url": (VIDEO, ("video_url", "url")),
    "input_video": (VIDEO, ("input_video", "video_url")),
    "video": (VIDEO, ("video", "video_url", "url")),
    "audio_url": (AUDIO, ("audio_url", "url")),
    "input_audio": (AUDIO, ("input_audio", "audio_url")),
    "audio": (AUDIO, ("audio", "audio_url", "url")),
    "file": (FILE, ("file",)),
    "input_file": (FILE, ("input_file", "file_data", "file_url")),
}
"""`type` of a part -> kind of its content, and the members that may hold it."""

DETAILS = ("auto", "low", "high", "default", "original")
_NUMBERS = ("min_pixels", "max_pixels", "min_dynamic_patch", "max_dynamic_patch")
_OPTION_NAMES = {"min_dynamic_patch": "min_tiles", "max_dynamic_patch": "max_tiles"}
PART_MEMBERS = ("url", "data", "detail", "format", "file_data", "file_url", "filename", *_NUMBERS)
"""Members of the object in a part that are read."""
MAX_OPTION = 2**31 - 1
_DATA_URL = re.compile(r"data:([\w.+-]*/?[\w.+-]*)((?:;[\w.+=-]*){0,8}),", re.ASCII)
_BASE64 = (string.ascii_letters + string.digits + "+/=_-").encode()
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,15}://", re.ASCII)
_MIN_BASE64 = 64
_GROUP_CHARS = 4
PIECE_CHARS = 1 << 18
"""Of a base64 text in one call, during which no other thread runs; a millisecond."""
MAX_PATH_CHARS = 4096


@dataclass(frozen=True)
class EncodedFile:
    """A file in base64, not decoded yet."""

    text: str
    param: str

    def decoded(self) -> bytes:
        """Its bytes; RequestError if the text is no base64."""
        return decoded(self.text, self.param)


@dataclass(frozen=True)
class MediaPart:
    """One picture or sound of a request, not fetched yet.

    Attributes:
        kind: IMAGE or AUDIO.
        source: a URL, or the file.
        param: the field that brings it, for errors.
        options: `detail` and limits of its resolution, for `rules.with_options`.
        key: equal for equal sources and options.
    """

    kind: str
    source: str | bytes | EncodedFile
    param: str
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    key: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        found = hashlib.sha256(repr(sorted(self.options.items())).encode())
        source = self.source
        found.update(type(source).__name__.encode())
        text = source.text if isinstance(source, EncodedFile) else source
        for begin in range(0, len(text), PIECE_CHARS):
            piece = text[begin : begin + PIECE_CHARS]
            found.update(
                piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogatepass")
            )
        object.__setattr__(self, "key", found.digest())


def is_media(part: object) -> bool:
    """Whether this part of a message is not text."""
    return is_object(part) and part.get("type") in MEDIA_TYPES


class PartReader:
    """Collects the parts of messages that are not text.

    Args:
        takes: kinds that the model takes.

    Attributes:
        parts: in order.
    """

    def __init__(self, takes: Collection[str]) -> None:
        self._takes = takes
        self.parts: list[MediaPart] = []

    def read(self, part: Mapping[str, object], param: str) -> str:
        """Read a part; returns its kind. Raises RequestError as `read_part` does."""
        self.parts.append(read_part(part, param, self._takes))
        return self.parts[-1].kind


def read_part(
    part: Mapping[str, object], param: str, takes: Collection[str] = (IMAGE,)
) -> MediaPart:
    """The picture or sound that a part of a message brings.

    Raises:
        RequestError: the model does not take its kind; it is a document; it has no source; an
            option is wrong.
    """
    name = str(part.get("type"))
    kind, members = MEDIA_TYPES[name]
    if kind != FILE and kind not in takes:
        raise not_taken(kind, param)
    found: object = None
    for member in members:
        if (found := part.get(member)) is not None:
            break
    options = {**part, **found} if is_object(found) else part
    if is_object(found):
        names = ("file_data", "file_url") if kind == FILE else ("url", "data")
        found = next((found[n] for n in names if found.get(n) is not None), None)
    if part.get("file_id") is not None or (is_object(options) and options.get("file_id")):
        raise RequestError(
            f"{param}: a part cannot name an uploaded file (file_id)",
            param="messages",
            code="not_available",
            hint="Send the file as a data URL",
        )
    if not isinstance(found, str) or not found:
        wanted = members[0] if len(members) == 1 else f"{members[0]} with a url"
        raise RequestError(f"{param}: a part of type {name} needs {wanted}", param="messages")
    source = source_of(found, param)
    if kind == AUDIO:
        return MediaPart(AUDIO, source, param)
    if kind == FILE:
        _check_file(found, options, param)
    return MediaPart(IMAGE, source, param, read_options(options, param))


NOUNS: Mapping[str, str] = {IMAGE: "pictures", AUDIO: "sounds", VIDEO: "videos"}
"""Kind -> what several of them are called."""


def not_taken(kind: str, param: str) -> RequestError:
    """The refusal of content that the model does not read."""
    what = {IMAGE: "pictures", AUDIO: "sound", VIDEO: "video"}.get(kind, kind)
    return RequestError(
        f"{param}: this model takes no {what}",
        param="messages",
        code="unsupported_content",
        hint=f"Leave out the {what}" + (", or send frames as pictures" if kind == VIDEO else ""),
    )


def read_options(given: Mapping[str, object], param: str) -> dict[str, object]:
    """`detail` and the numbers that bound a picture's resolution.

    Raises:
        RequestError: one is malformed.
    """
    options: dict[str, object] = {}
    detail = given.get("detail")
    if detail is not None:
        if detail not in DETAILS:
            raise RequestError(
                f"{param}: detail must be one of {', '.join(DETAILS)}, got {str(detail)[:40]!r}",
                param="messages",
            )
        if detail == "low":
            options["detail"] = detail
    for name in _NUMBERS:
        value = whole_number(given.get(name))
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= MAX_OPTION:
            raise RequestError(
                f"{param}: {name} must be an integer in [1, {MAX_OPTION}], got {str(value)[:40]}",
                param="messages",
            )
        options[_OPTION_NAMES.get(name, name)] = value
    return options


def source_of(text: str, param: str) -> str | EncodedFile:
    """A URL as it is, an absolute path as file: URL, or the file in a data URL or in base64.

    Raises:
        RequestError: it is none of these.
    """
    if text[:5].lower() == "data:":
        return _of_data_url(text, param)
    if _URL.match(text):
        return text
    if len(text) >= _MIN_BASE64 and _is_base64(text):
        return EncodedFile(text, param)
    if text.startswith("/") and len(text) <= MAX_PATH_CHARS:
        return f"file://{quote(text)}"
    raise RequestError(
        f"{param}: {text[:60]!r} is neither a URL nor base64",
        param="messages",
        code="invalid_image_url",
        hint="Send https://…, or data:image/png;base64,…",
    )


def _of_data_url(url: str, param: str) -> EncodedFile:
    head = _DATA_URL.match(url[:512])
    if head is None:
        raise RequestError(
            f"{param}: the data URL has no ',' after its media type",
            param="messages",
            code="invalid_image_url",
            hint="Send data:image/png;base64,…",
        )
    if ";base64" not in head.group(2).lower():
        raise RequestError(
            f"{param}: the data URL is not base64",
            param="messages",
            code="invalid_image_url",
            hint="Send data:image/png;base64,…",
        )
    return EncodedFile(url[head.end() :], param)


def decoded(text: str, param: str) -> bytes:
    """The bytes of a base64 text, in either alphabet; RequestError if it is none."""
    try:
        data = b"".join(_decoded_pieces(text))
    except (ValueError, UnicodeEncodeError):
        raise RequestError(
            f"{param}: its base64 is broken", param="messages", code="invalid_image"
        ) from None
    if not data:
        raise RequestError(f"{param}: its file is empty", param="messages", code="invalid_image")
    return data


def _decoded_pieces(text: str) -> Iterator[bytes]:
    """Decode base64 in pieces, between which other threads run; ValueError if it is none.

    msgspec decodes what is written in the usual way, in a third of the time.
    """
    rest = b""
    for begin in range(0, len(text), PIECE_CHARS):
        piece = text[begin : begin + PIECE_CHARS].encode("ascii")
        is_last = begin + PIECE_CHARS >= len(text)
        if not rest and b"\\" not in piece and (is_last or not piece.endswith(b"=")):
            with suppress(ValueError):  # of msgspec too
                yield _QUICK.decode(b'"%b"' % piece)
                continue
        rest += piece.translate(_STANDARD, b" \t\r\n")
        end = rest.find(b"=")
        whole = (len(rest) if end < 0 else end) & ~3
        yield base64.b64decode(rest[:whole], validate=True)
        rest = rest[whole:]
        if len(rest) > _GROUP_CHARS:  # something follows the end
            raise ValueError
    last = rest.rstrip(b"=")
    yield base64.b64decode(last + b"=" * (-len(last) % _GROUP_CHARS), validate=True)


def _is_base64(text: str) -> bool:
    pieces = (text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS))
    return text.isascii() and not any(piece.encode().translate(None, _BASE64) for piece in pieces)


_QUICK = msgspec.json.Decoder(bytes)
_STANDARD = bytes.maketrans(b"-_", b"+/")


def _check_file(text: str, part: Mapping[str, object], param: str) -> None:
    """RequestError unless the file of a `file` part is a picture."""
    name = str(part.get("filename") or "")[-80:]
    is_picture = text[:11].lower() == "data:image/"
    if not is_picture:
        raise RequestError(
            f"{param}: a file must be a picture" + (f", and {name!r} is none" if name else ""),
            param="messages",
            code="unsupported_content",
            hint="Send pages of a document as pictures, or its text as text",
        )
