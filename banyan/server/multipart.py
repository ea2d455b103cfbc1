"""multipart/form-data (RFC 7578): the fields of a form, and the file that came with them."""

import re
from dataclasses import dataclass
from email.message import Message

from banyan.base.errors import RequestError

MAX_PARTS = 32

_HEAD_END = b"\r\n\r\n"
_DISPOSITION = re.compile(rb"content-disposition:[ \t]*(.*)", re.IGNORECASE)


@dataclass(frozen=True)
class Part:
    """One part of a form. `filename` is None of a plain field."""

    name: str
    filename: str | None
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


def read_form(body: bytes, content_type: str) -> list[Part]:
    """The parts of a form, in order.

    Args:
        content_type: of the request, with its boundary.

    Raises:
        RequestError: the body is no such form, or has more than MAX_PARTS parts.
    """
    kind = _header(content_type)
    boundary = kind.get_param("boundary")
    if kind.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise _refusal("the body must be multipart/form-data with a boundary")
    mark = b"\r\n--" + boundary.encode("latin-1", "replace")
    pieces = (b"\r\n" + body).split(mark, MAX_PARTS + 2)
    if len(pieces) < 2 or len(pieces) > MAX_PARTS + 2:
        raise _refusal(f"the form must have 1 to {MAX_PARTS} parts")
    if not pieces[-1].startswith(b"--"):
        raise _refusal("the form is not ended by its boundary")
    return [_part(piece) for piece in pieces[1:-1]]


def _part(piece: bytes) -> Part:
    head, found, content = piece.partition(_HEAD_END)
    line = next((m for m in map(_DISPOSITION.match, head.split(b"\r\n")) if m), None)
    if not found or line is None:
        raise _refusal("a part of the form has no Content-Disposition")
    fields = _header(line.group(1).decode("utf-8", "replace"))
    name, filename = fields.get_param("name"), fields.get_filename()
    if not isinstance(name, str):
        raise _refusal("a part of the form has no name")
    return Part(name, filename, content)


def _header(text: str) -> Message:
    """A header's value and its parameters."""
    parsed = Message()
    parsed["content-type"] = text
    if not text.lower().startswith("multipart/"):
        parsed["content-disposition"] = text
    return parsed


def _refusal(text: str) -> RequestError:
    return RequestError(text, code="invalid_form")
