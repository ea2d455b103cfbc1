"""Parser of multipart/form-data (RFC 7578): form fields and an uploaded file."""

import re
from dataclasses import dataclass
from urllib.parse import unquote

from banyan.base.errors import RequestError

MAX_PARTS = 32
MAX_HEAD_BYTES = 8 << 10
"""Longest head of a part, and longest Content-Type of a form."""

MAX_BOUNDARY = 70
"""Characters (RFC 2046)."""

_HEAD_END = b"\r\n\r\n"
_DISPOSITION = re.compile(r"content-disposition:[ \t]*form-data[ \t]*(?=;|$)", re.IGNORECASE)
_FORM = re.compile(r"[ \t]*multipart/form-data[ \t]*(?=;|$)", re.IGNORECASE)
_PARAMETER = re.compile(r';[ \t]*([\w*-]{1,32})=(?:"((?:[^"\\]|\\.)*)"|([^";\s]+))[ \t]*', re.ASCII)
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True)
class Part:
    """One part of a form. `filename` is None for a plain field."""

    name: str
    filename: str | None
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


def read_form(body: bytes, content_type: str) -> list[Part]:
    """The parts of a form, in order.

    Args:
        content_type: header of the request, with the boundary.

    Raises:
        RequestError: the body is malformed or exceeds a limit.
    """
    kind = _FORM.match(content_type) if len(content_type) <= MAX_HEAD_BYTES else None
    boundary = _parameters(content_type, kind.end()).get("boundary", "") if kind else ""
    if not 0 < len(boundary) <= MAX_BOUNDARY:
        raise _refusal(
            "the body must be multipart/form-data with a boundary of at most "
            f"{MAX_BOUNDARY} characters"
        )
    mark = b"\r\n--" + boundary.encode("latin-1", "replace")
    pieces = (b"\r\n" + body).split(mark, MAX_PARTS + 2)
    if len(pieces) < 2 or len(pieces) > MAX_PARTS + 2:
        raise _refusal(f"the form must have 1 to {MAX_PARTS} parts")
    if not pieces[-1].startswith(b"--"):
        raise _refusal("the form is not ended by its boundary")
    return [_part(piece) for piece in pieces[1:-1]]


def _part(piece: bytes) -> Part:
    end = piece.find(_HEAD_END, 0, MAX_HEAD_BYTES + len(_HEAD_END))
    if end < 0:
        raise _refusal(f"a part of the form has no head of at most {MAX_HEAD_BYTES} bytes")
    lines = piece[:end].decode("utf-8", "replace").split("\r\n")
    found = next((m for m in map(_DISPOSITION.match, lines) if m), None)
    if found is None:
        raise _refusal("a part of the form has no Content-Disposition")
    fields = _parameters(found.string, found.end())
    if "name" not in fields:
        raise _refusal("a part of the form has no name")
    return Part(fields["name"], _filename(fields), piece[end + len(_HEAD_END) :])


def _parameters(line: str, at: int) -> dict[str, str]:
    """The parameters of a header value from position `at`, up to the first malformed one."""
    found: dict[str, str] = {}
    while match := _PARAMETER.match(line, at):
        name, quoted, plain = match.groups()
        value = plain if quoted is None else _ESCAPED.sub(r"\1", quoted)
        found.setdefault(name.lower(), value)
        at = match.end()
    return found


def _filename(fields: dict[str, str]) -> str | None:
    """The name of the file, also in the form of RFC 5987 (charset'language'percent-encoded)."""
    charset, _, rest = fields.get("filename*", "").partition("'")
    if charset.lower() == "utf-8" and "'" in rest:
        return unquote(rest.partition("'")[2])
    return fields.get("filename")


def _refusal(text: str) -> RequestError:
    return RequestError(text, code="invalid_form")
