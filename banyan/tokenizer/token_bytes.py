"""PieceTable: token id → bytes, for every way in which vocabularies spell them.

Two spellings exist among models that generate text: byte-level (every byte has a printable
stand-in), and word pieces with "▁" for a space and "<0xNN>" for single bytes. Everything that turns
ids into text goes through this table, so a stream and a whole answer cannot differ.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from banyan.base.errors import ModelError
from banyan.base.log import printable

T = TypeVar("T")

SPACE_MARK = "▁"


class PieceTable:
    """Bytes by id, filled on first use; holds at most one entry for each id of the vocabulary.

    Args:
        decoder: the description of the tokenizer's decoder, as in tokenizer.json.
        spell: the vocabulary's spelling of an id; None outside the vocabulary.
        source: the file, for messages.

    Raises:
        ModelError: the decoder is of another kind.
    """

    def __init__(
        self, decoder: Mapping[str, object], spell: Callable[[int], str | None], source: str
    ) -> None:
        self._spell = spell
        self._bytes = _Filled(self._make)
        self.texts: Mapping[int, str | None] = _Filled(self._make_text)
        """The same as text; None if the bytes are not whole characters."""
        steps = list(_steps(decoder))
        kinds = [str(step.get("type")) for step in steps]
        unknown = [k for k in kinds if k not in _KNOWN_STEPS]
        if unknown:
            raise ModelError(
                f"the tokenizer of {printable(source)!r} decodes with {printable(unknown[0])!r}, "
                f"which is not supported for generating text",
                f"use a model whose decoder is one of: {', '.join(_KNOWN_STEPS)}",
            )
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._replaced = [_replacement(s) for s in steps if s.get("type") == "Replace"]
        metaspace = [s for s in steps if s.get("type") == "Metaspace"]
        self._replaced += [(str(s.get("replacement", SPACE_MARK)), " ") for s in metaspace]
        self.strips_first_space = any(
            s.get("type") == "Strip" and s.get("content") == " " and s.get("start") == 1
            for s in steps
        ) or any(s.get("prepend_scheme", "always") != "never" for s in metaspace)
        """Whether a space at the very start of a text comes from the vocabulary, not from the
        text."""

    def __getitem__(self, id: int) -> bytes:
        return self._bytes[id]

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self._bytes.__getitem__, ids))

    def text(self, ids: Sequence[int]) -> str:
        """The text of a whole answer; ill-formed bytes become U+FFFD."""
        text = self.bytes_of(ids).decode("utf-8", "replace")
        return text[1:] if self.strips_first_space and text[:1] == " " else text

    def _make_text(self, id: int) -> str | None:
        try:
            return self._bytes[id].decode()
        except UnicodeDecodeError:
            return None

    def _make(self, id: int) -> bytes:
        token = self._spell(id) if 0 <= id < 1 << 32 else None
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(map(BYTE_OF_MARK.__getitem__, token))
            except KeyError:
                return token.encode()  # an added token, spelled as it is
        if self._byte_fallback and len(token) == 6 and token[:3] == "<0x" and token[5] == ">":
            try:
                return bytes((int(token[3:5], 16),))
            except ValueError:
                return token.encode()
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()


class _Filled(dict[int, T]):
    """Results by id, computed on first use."""

    def __init__(self, make: Callable[[int], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, id: int) -> T:
        piece = self[id] = self._make(id)
        return piece


_KNOWN_STEPS = ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip")


def _steps(decoder: Mapping[str, object]) -> Iterable[Mapping[str, object]]:
    if decoder.get("type") != "Sequence":
        return (decoder,)
    inner = decoder.get("decoders")
    return chain.from_iterable(_steps(d) for d in inner) if isinstance(inner, list) else ()


def _replacement(step: Mapping[str, object]) -> tuple[str, str]:
    pattern = step.get("pattern")
    old = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(old, str) or not old:
        raise ModelError("the tokenizer's decoder replaces a pattern, which is not supported")
    return old, str(step.get("content", ""))


def _byte_marks() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the rest follow from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    marks = {chr(byte): byte for byte in plain}
    marks.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return marks


BYTE_OF_MARK: Mapping[str, int] = _byte_marks()
