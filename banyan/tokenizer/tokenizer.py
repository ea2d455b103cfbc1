"""Tokenizer: text to token ids and back, over the `tokenizers` library.

folder_tokenizer.py (a model folder) and gguf_tokenizer.py (a GGUF file) load it. Everything that
turns ids into text goes through its PieceTable, so a stream and a whole answer cannot differ.
"""

import copy
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby
from os.path import commonprefix
from typing import TypeVar

import tokenizers

from banyan.base.errors import BanyanError, ModelError, RequestError
from banyan.base.log import printable
from banyan.tokenizer.encode import EncodeKind, Encoder, LibraryEncoder, is_library_error

T = TypeVar("T")

SPACE_MARK = "▁"


class PieceTable:
    """Bytes by id, filled on first use; holds at most one entry for each id of the vocabulary.

    Two spellings exist among models that generate text: byte-level (every byte has a printable
    stand-in), and word pieces with "▁" for a space and "<0xNN>" for single bytes.

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


NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

_SPACES = re.compile(r"\s*")
_SEQUENCES = ("normalizers", "pretokenizers", "decoders")

MAX_PROBED = 64
MAX_PARTS = 64
"""Steps of a normalizer or decoder."""
MAX_GROWTH = 64
"""Factor by which all replacements together may lengthen a text."""

T = TypeVar("T")


@dataclass(frozen=True)
class _Piece:
    """Text between added tokens. `at_start` is False if it continues a longer text."""

    text: str
    at_start: bool


Part = Mapping[str, object]
"""One part of a tokenizer as its file describes it."""


@dataclass(frozen=True)
class TokenizerFacts:
    """How a vocabulary is used, from the tokenizer's files."""

    source: str
    """The file or folder, for messages."""
    named: Mapping[str, str] = field(default_factory=dict)
    """"bos_token", "eos_token" … -> text, as chat templates see them."""
    eos_ids: tuple[int, ...] = ()
    """Every id that ends a generation."""
    special: tuple[str, ...] = ()
    """Special texts in addition to the ones that the vocabulary marks."""
    add_bos: bool | None = None
    """Whether plain prompts start with bos_token; None: as the tokenizer file says."""
    add_eos: bool | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """"default", and where the model has them "tool_use" and others."""

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")


class Tokenizer:
    """A loaded vocabulary. Immutable and thread-safe.

    Args:
        backend: the library's tokenizer, owned by this object.
        facts: named tokens, end ids and templates from its files.
    """

    def __init__(self, backend: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        check_growth(backend, facts.source)
        self._backend = backend
        self.encoder: Encoder = LibraryEncoder(backend)
        """Turns texts into ids."""
        self.waits = False
        """Whether the encoder waits for other requests or processes. Then texts are sent in one
        batch, and never from an event loop."""
        backend.no_truncation()
        backend.no_padding()
        self.facts = facts
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._added_tokens = {token.content: token for token in added.values()}
        self.added = {token.content: id for id, token in added.items()}
        """Added text → id. Added texts are cut out before the vocabulary is applied."""
        named = {facts.named[n] for n in NAMED_TOKENS if n in facts.named}
        marked = {text for text, token in self._added_tokens.items() if token.special}
        texts = named | set(facts.special) | marked
        found = (backend.token_to_id(text) for text in texts)
        self.special_ids = frozenset(id for id in found if id is not None)
        bos = facts.named.get("bos_token")
        self.bos_id = None if bos is None else backend.token_to_id(bos)
        self.eos_ids = facts.eos_ids
        self._prefix, self._suffix = self._frame()
        self.probes = _probes(backend)
        """Runs of the letters that the pre-tokenizer's patterns name: hostile patterns hang on
        them."""

    def through(self, encoder: Encoder) -> "Tokenizer":
        """The same tokenizer with another encoder, which gets all texts of a request at once."""
        other = copy.copy(self)
        other.encoder, other.waits = encoder, True
        return other

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        """Ids before and after a plain prompt."""
        return list(self._prefix), list(self._suffix)

    def copy_of_backend(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self._backend.to_str())

    @property
    def special_texts(self) -> frozenset[str]:
        """Added texts that are special."""
        return frozenset(text for text, id in self.added.items() if id in self.special_ids)

    @cached_property
    def pieces(self) -> PieceTable:
        """The bytes of each id.

        Raises:
            ModelError: the tokenizer's decoder works on whole words, so tokens have no bytes of
                their own (such models embed text, they do not generate it).
        """
        decoder = self._backend.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "Fuse"}
        return PieceTable(state, self._backend.id_to_token, self.facts.source)

    def id_to_token(self, id: int) -> str | None:
        """The vocabulary's own spelling of one id; None outside the vocabulary."""
        return self._backend.id_to_token(id) if 0 <= id < 1 << 32 else None

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special_tokens: put the model's own start and end tokens around it.
            parse_special: texts of added tokens become their ids; otherwise they are plain text.

        Raises:
            RequestError: the text is not valid Unicode, or the tokenizer's pattern gives up on it.
        """
        ids = self._parsed(text) if parse_special else self._plain(text, at_start=True)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Encode several texts in one call of the library, which encodes them in parallel.

        Raises:
            RequestError: as `encode`, for any of them.
        """
        found = self.encoder.ids(texts, EncodeKind.PARSED)
        return (
            [[*self._prefix, *ids, *self._suffix] for ids in found] if add_special_tokens else found
        )

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts, pieces_ids by the model's own template with special tokens.

        Raises:
            RequestError: as `encode`.
        """
        if not first or not second:
            raise RequestError("Both texts of a pair need at least one character.", param="text")
        (ids,) = self.encoder.ids((first, second), EncodeKind.PAIR)
        return ids

    def encode_guarded(self, text: str, guards: Sequence[int]) -> list[int]:
        """Token ids of a rendered chat. Control tokens never form across message content.

        Args:
            guards: ascending positions in `text`; the character before each one is message
                content. An added token that would include such a character is plain text.

        Raises:
            RequestError: as `encode`.
        """
        if not guards:
            return self._parsed(text)
        found: list[_Piece | int] = []
        at, next_guard, search = 0, 0, 0
        while (match := self._added_pattern.search(text, search)) is not None:
            start, end = match.span()
            while next_guard < len(guards) and guards[next_guard] <= start:
                next_guard += 1
            is_content = next_guard < len(guards) and guards[next_guard] <= end
            token = self._added_tokens[match.group()]
            if is_content or (token.single_word and _is_within_word(text, start, end)):
                search = start + 1
                continue
            before = text[at:start]
            found.append(_Piece(before.rstrip() if token.lstrip else before, at == 0))
            found.append(self.added[token.content])
            spaces = _SPACES.match(text, end) if token.rstrip else None
            at = search = spaces.end() if spaces else end
        return self._concatenated([*found, _Piece(text[at:], at == 0)])

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of `ids`. Ids outside the vocabulary are skipped.

        Args:
            spaces_between_special_tokens: concerns word-level vocabularies only. The vocabularies
                read here carry their own spaces, so the text is the same either way.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return self.pieces.text([id for id in ids if id not in skipped])

    def _frame(self) -> tuple[list[int], list[int]]:
        """The ids that the model expects before and after a plain prompt."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        framed = self._backend.encode("a", add_special_tokens=True).ids
        start = next(
            (i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), len(framed)
        )
        prefix, suffix = framed[:start], framed[start + len(bare) :]
        if self.facts.add_bos is not None and self.bos_id is not None:
            prefix = [id for id in prefix if id != self.bos_id]
            prefix = [self.bos_id, *prefix] if self.facts.add_bos else prefix
        eos = self.facts.named.get("eos_token")
        eos_id = None if eos is None else self._backend.token_to_id(eos)
        if self.facts.add_eos is not None and eos_id is not None:
            suffix = [id for id in suffix if id != eos_id]
            suffix = [*suffix, eos_id] if self.facts.add_eos else suffix
        return prefix, suffix

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        return any_of(self.added.keys())

    @cached_property
    def _lead(self) -> list[int]:
        return self._plain("\n", True)

    @cached_property
    def _prefixes_start(self) -> bool:
        """Whether the vocabulary puts a space before the start of a text, and only there."""
        part = self._backend.pre_tokenizer
        return part is not None and '"prepend_scheme":"first"' in part.__getstate__().decode()

    def _parsed(self, text: str) -> list[int]:
        (ids,) = self.encoder.ids((text,), EncodeKind.PARSED)
        return ids

    def _concatenated(self, found: "Sequence[_Piece | int]") -> list[int]:
        """Ids of the pieces of a text and of the added tokens between them."""
        pieces = [piece for piece in found if isinstance(piece, _Piece)]
        if self.waits:
            each = iter(self._plain_all(pieces))
        else:
            each = (ids for piece in pieces for ids in self._plain_all([piece]))
        pieces_ids: list[int] = []
        for piece in found:
            pieces_ids += next(each) if isinstance(piece, _Piece) else (piece,)
        return pieces_ids

    def _plain(self, text: str, at_start: bool) -> list[int]:
        (ids,) = self._plain_all([_Piece(text, at_start)])
        return ids

    def _plain_all(self, pieces: "Sequence[_Piece]") -> list[list[int]]:
        """Ids of each piece that has no added tokens."""
        texts = [self._with_lead(piece) for piece in pieces]
        full = [text for text in texts if text]
        found = iter(self.encoder.ids(full, EncodeKind.PLAIN) if full else ())
        return [
            self._without_lead(next(found), piece) if text else []
            for text, piece in zip(texts, pieces, strict=True)
        ]

    def _with_lead(self, piece: "_Piece") -> str:
        """Encode with a leading line break, which absorbs the start-of-text space; drop both
        again."""
        has_lead = piece.text and self._prefixes_start and not piece.at_start
        return "\n" + piece.text if has_lead else piece.text

    def _without_lead(self, ids: list[int], piece: "_Piece") -> list[int]:
        if piece.at_start or not self._prefixes_start:
            return ids
        lead = self._lead
        return ids[len(lead) :] if ids[: len(lead)] == lead else self._plain(piece.text, True)


def _probes(backend: tokenizers.Tokenizer) -> list[str]:
    part = backend.pre_tokenizer
    state = json.loads(part.__getstate__()) if part is not None else {}
    patterns = "".join(p for part in _parts_of(state) if (p := _regex_of(part)))
    letters = list(dict.fromkeys(c for c in patterns if c.isalnum()))[:MAX_PROBED]
    return [letter * 48 + end for letter in letters for end in ("", "\x00")]


def build_backend(path: str, build: Callable[[], T]) -> T:
    """Call `build`; every error of the library becomes a ModelError."""
    try:
        return build()
    except BaseException as error:
        if isinstance(error, BanyanError) or not is_library_error(error):
            raise
        raise ModelError(
            f"the tokenizer of {printable(path)!r} cannot be read: {printable(str(error))}",
            "download it again, or take it from the model's publisher",
        ) from None


def check_growth(backend: tokenizers.Tokenizer, source: str) -> None:
    """Raise ModelError if chained replacements could make a text endless."""
    for part in (backend.normalizer, backend.decoder):
        steps = _parts_of(json.loads(part.__getstate__())) if part is not None else []
        growth = math.prod(map(_growth, steps))
        if len(steps) > MAX_PARTS or growth > MAX_GROWTH:
            raise ModelError(
                f"the tokenizer of {printable(source)!r} rewrites text in {len(steps):,} steps "
                f"that make it up to {growth:,.0f} times as long; limits {MAX_PARTS} and "
                f"{MAX_GROWTH}",
                "take the tokenizer from the model's publisher",
            )


def _parts_of(state: Part) -> list[Part]:
    """The parts of a sequence, in order; any other part alone."""
    found: list[Part] = []
    waiting: list[object] = [state]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        inner = next((part[name] for name in _SEQUENCES if isinstance(part.get(name), list)), None)
        if inner is None:
            found.append(part)
        else:
            waiting += reversed(inner)
    return found


def _regex_of(part: Part) -> str:
    pattern = part.get("pattern")
    return str(pattern.get("Regex", "")) if isinstance(pattern, Mapping) else ""


def _growth(part: Part) -> float:
    """How many characters a part turns one character into, at most."""
    pattern, content = part.get("pattern"), part.get("content")
    if part.get("type") != "Replace" or not isinstance(content, str):
        return 1.0
    old = pattern.get("String", "") if isinstance(pattern, Mapping) else ""
    return max(1.0, len(content) / max(1, len(str(old))))


def _is_within_word(text: str, start: int, end: int) -> bool:
    edges = (text[start - 1 : start], text[end : end + 1])
    return any(char.isalnum() or char == "_" for char in edges)


def any_of(texts: Collection[str]) -> re.Pattern[str]:
    """A pattern for the longest of `texts` at the leftmost position; without texts it never
    matches."""
    return re.compile(_branches(sorted(set(texts))) if texts else r"(?!)")


def _branches(texts: list[str]) -> str:
    """The texts (sorted, distinct) as a tree of common prefixes."""
    start = commonprefix([texts[0], texts[-1]])
    rest = [text[len(start) :] for text in texts]
    ends_here = rest[0] == ""
    groups = [_branches(list(g)) for _, g in groupby(rest[ends_here:], key=lambda text: text[0])]
    if not groups:
        return re.escape(start)
    return f"{re.escape(start)}(?:{'|'.join(groups)}){'?' if ends_here else ''}"
