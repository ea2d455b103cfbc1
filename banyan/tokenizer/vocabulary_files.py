"""Tokenizers of folders without tokenizer.json, rebuilt for the `tokenizers` library.

| file | kind |
|---|---|
| tokenizer.model | SentencePiece (Llama 2, Gemma, InternLM), or a list of ranks (Llama 3) |
| tiktoken.model, *.tiktoken | ranks: lines of base64 and number (Kimi) |
| tekken.json | Mistral: base64, ranks and the split pattern |
| vocab.json and merges.txt | byte-level BPE (GPT-2, Qwen2) |

A model's own Python code, which some of these folders bring, is not run. A rank file has no split
pattern; the tokenizer's class names it. Sources: SentencePiece's protobuf definition, tiktoken's
file format, mistral-common's tekken format.
"""

import base64
import binascii
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from banyan.base.errors import ModelError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import printable
from banyan.base.os import open_regular
from banyan.tokenizer.gguf_tokenizer import (
    MAX_MERGES,
    MAX_TOKEN_CHARS,
    MAX_VOCABULARY,
    SPLITS,
    GGUFVocabulary,
)
from banyan.tokenizer.tokenizer import SPACE_MARK

MAX_BYTES = 128 << 20
_UNIGRAM, _BPE = 1, 2
_UNKNOWN, _USER_DEFINED, _BYTE = 2, 4, 6
"""SentencePiece's numbers of kinds of pieces."""
_HAN = r"[\p{Han}]+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI = (
    rf"{_HAN}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RANK_PATTERNS = {
    "TikTokenTokenizer": _KIMI,
    "QWenTokenizer": SPLITS["qwen2"][0],
    "LlamaTokenizer": SPLITS["llama3"][0],
    "LlamaTokenizerFast": SPLITS["llama3"][0],
    "PreTrainedTokenizerFast": SPLITS["llama3"][0],
}
"""Tokenizer class -> split pattern of a rank file."""
_RESERVED = 256
"""Ids after the ranks of a rank file that belong to special tokens."""
_MERGE_PATTERNS = {
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer", "RobertaTokenizer"), "gpt-2"),
    **dict.fromkeys(("Qwen2Tokenizer",), "qwen2"),
}
"""Tokenizer class, without "Fast" -> pre-tokenizer of a merges file."""


@dataclass(frozen=True)
class FolderVocabulary:
    """
    Attributes:
        named: names of special tokens ("bos_token") -> their texts.
        add_bos: whether a text begins with the bos token, unless the configuration says so.
    """

    backend: tokenizers.Tokenizer
    named: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool | None = None


def read_vocabulary(path: str, config: Mapping[str, object]) -> FolderVocabulary | None:
    """The tokenizer of the folder at `path`; None if it has none of the known files.

    Args:
        config: its tokenizer_config.json.

    Raises:
        ModelError: the files are damaged, or of an unknown kind.
    """
    tekken = os.path.join(path, "tekken.json")
    if os.path.exists(tekken):
        return _tekken(tekken)
    for name in _rank_files(path):
        raw = _read(os.path.join(path, name))
        if _is_rank_file(raw):
            return _ranked(os.path.join(path, name), raw, config)
        return _sentence_pieces(os.path.join(path, name), raw)
    vocabulary, merges = (os.path.join(path, name) for name in ("vocab.json", "merges.txt"))
    if os.path.exists(vocabulary) and os.path.exists(merges):
        return _merged(vocabulary, merges, config)
    return None


def _rank_files(path: str) -> list[str]:
    """Names of files that may hold a vocabulary, tokenizer.model last."""
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return []
    ranks = [name for name in names if name == "tiktoken.model" or name.endswith(".tiktoken")]
    return [*ranks, *(name for name in names if name == "tokenizer.model")]


def _read(path: str) -> bytes:
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _damaged(path, str(error.strerror)) from None
    if len(raw) > MAX_BYTES:
        raise _damaged(path, f"it is larger than {MAX_BYTES:,} bytes")
    return raw


def _damaged(path: str, what: str) -> ModelError:
    return ModelError(
        f"{printable(path)!r} cannot be read: {printable(what)}",
        "download it again, or take it from the model's publisher",
    )


def _byte_level(
    path: str, tokens: Sequence[bytes], first: int, pattern: str, special: Mapping[int, str]
) -> tokenizers.Tokenizer:
    """Byte-level BPE: a text's pieces are merged in the order of their tokens.

    Args:
        tokens: by rank.
        first: id of the first of them.
        special: id -> text of the special tokens.
    """
    if not 256 <= len(tokens) <= MAX_VOCABULARY:
        raise _damaged(path, f"it has {len(tokens):,} tokens")
    if any(not 0 < len(token) <= MAX_TOKEN_CHARS for token in tokens):
        raise _damaged(path, f"a token has no bytes or more than {MAX_TOKEN_CHARS:,}")
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) != len(tokens):
        raise _damaged(path, "a token appears twice")
    shown = {token: _shown(token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in tokens:
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(shown[left], shown[right]) for left, right in known]
        if len(merges) > MAX_MERGES:
            raise _damaged(path, f"it allows more than {MAX_MERGES:,} merges")
    vocabulary = {shown[token]: first + rank for token, rank in ranks.items()}
    vocabulary |= {text: id for id, text in special.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(special[id], special=True, normalized=False) for id in sorted(special)]
    )
    return backend


def _byte_texts() -> dict[int, str]:
    """GPT-2's text for each byte: printable ones stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    texts = {byte: chr(byte) for byte in plain}
    return texts | {byte: chr(0x100 + at) for at, byte in enumerate(others)}


_BYTE_TEXTS = _byte_texts()


def _shown(token: bytes) -> str:
    return "".join(_BYTE_TEXTS[byte] for byte in token)


def _decoded(path: str, text: object) -> bytes:
    try:
        if not isinstance(text, str | bytes):
            raise ValueError
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise _damaged(path, f"{str(text)[:40]!r} is not base64") from None


def _is_rank_file(raw: bytes) -> bool:
    """Lines of base64, a space and a number."""
    first, space, rank = raw[:4096].partition(b"\n")[0].strip().partition(b" ")
    return bool(first and space and rank.isdigit())


def _ranked(path: str, raw: bytes, config: Mapping[str, object]) -> FolderVocabulary:
    name = config.get("tokenizer_class")
    if not isinstance(name, str) or name not in _RANK_PATTERNS:
        raise ModelError(
            f"{printable(path)!r} has no split pattern, and the tokenizer class "
            f"{printable(repr(name), 80)} is unknown",
            f"known are: {', '.join(_RANK_PATTERNS)}; or save it with transformers",
        )
    found: dict[int, bytes] = {}
    for line in raw.splitlines():
        token, _, rank = line.strip().partition(b" ")
        if not token:
            continue
        if not rank.isdigit() or len(rank) > 9:
            raise _damaged(path, f"{line[:40]!r} is not a token and its rank")
        found[int(rank)] = _decoded(path, token)
    if sorted(found) != list(range(len(found))):
        raise _damaged(path, "its ranks are not 0, 1, 2 …")
    special = _special_of(config, len(found))
    tokens = [found[rank] for rank in range(len(found))]
    return FolderVocabulary(_byte_level(path, tokens, 0, _RANK_PATTERNS[name], special))


def _special_of(config: Mapping[str, object], first: int) -> dict[int, str]:
    """The special tokens after the ranks; ids without a text are reserved."""
    entries = config.get("added_tokens_decoder")
    texts = {id: f"<|reserved_token_{id}|>" for id in range(first, first + _RESERVED)}
    for key, entry in entries.items() if is_object(entries) else ():
        text = entry.get("content") if is_object(entry) else None
        if isinstance(text, str) and key.isdecimal() and len(key) < 10 and int(key) in texts:
            texts[int(key)] = text
    return texts


def _tekken(path: str) -> FolderVocabulary:
    try:
        content: object = json.loads(_read(path))
    except (ValueError, RecursionError):
        raise _damaged(path, "it is not JSON") from None
    config = content.get("config") if is_object(content) else None
    words = content.get("vocab") if is_object(content) else None
    if not is_object(content) or not is_object(config) or not is_list(words):
        raise _damaged(path, "it lacks config or vocab")
    pattern = config.get("pattern")
    size, count = config.get("default_vocab_size"), config.get("default_num_special_tokens")
    if not isinstance(pattern, str) or type(size) is not int or type(count) is not int:
        raise _damaged(path, "config lacks pattern, default_vocab_size or the special tokens")
    if not 0 <= count < size <= MAX_VOCABULARY:
        raise _damaged(path, f"it has {count:,} special tokens of {size:,}")
    special = {id: f"<SPECIAL_{id}>" for id in range(count)}
    for entry in _entries(content.get("special_tokens"), path):
        rank, text = entry.get("rank"), entry.get("token_str")
        if type(rank) is int and rank in special and isinstance(text, str):
            special[rank] = text
    tokens = [_decoded(path, entry.get("token_bytes")) for entry in _entries(words, path)]
    backend = _byte_level(path, tokens[: size - count], count, pattern, special)
    texts = set(special.values())
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    named = {name: text for name, text in names.items() if text in texts}
    return FolderVocabulary(backend, named, add_bos=True)


def _entries(listed: object, path: str) -> Iterator[Mapping[str, object]]:
    for entry in listed if is_list(listed) else ():
        if not is_object(entry):
            raise _damaged(path, "an entry is not an object")
        yield entry


def _merged(vocabulary: str, merges: str, config: Mapping[str, object]) -> FolderVocabulary:
    name = str(config.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    if name not in _MERGE_PATTERNS:
        raise ModelError(
            f"{printable(vocabulary)!r} is of the tokenizer class {printable(name, 80)}, whose "
            "split pattern is unknown",
            f"known are: {', '.join(_MERGE_PATTERNS)}; or save it with transformers",
        )
    try:
        ids: object = json.loads(_read(vocabulary))
        lines = _read(merges).decode().splitlines()
    except (ValueError, RecursionError) as error:
        raise _damaged(vocabulary, str(error)) from None
    is_good = is_object(ids) and all(type(id) is int and 0 <= id < 1 << 31 for id in ids.values())
    if not is_object(ids) or not is_good or len(ids) > MAX_VOCABULARY or len(lines) > MAX_MERGES:
        raise _damaged(vocabulary, "it is not a mapping from texts to ids")
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in pairs):
        raise _damaged(merges, "a line is not a pair")
    split = _MERGE_PATTERNS[name]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: id for text, id in ids.items() if isinstance(id, int)},
            merges=[(pair[0], pair[1]) for pair in pairs],
        )
    )
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    has_prefix = config.get("add_prefix_space") is True
    steps = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in SPLITS[split]]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix, use_regex=True)
    parts = [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    backend.pre_tokenizer = whole if split == "gpt-2" else pre_tokenizers.Sequence(parts)
    backend.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    named = {"eos_token": end} if end in ids else {}
    texts = {_text_of(config.get(f"{each}_token")) for each in ("bos", "eos", "unk", "pad")}
    known = sorted({text for text in (*texts, *named.values()) if text in ids})
    backend.add_special_tokens([AddedToken(text, special=True) for text in known])
    return FolderVocabulary(backend, named)


def _text_of(value: object) -> str:
    text = value.get("content") if is_object(value) else value
    return text if isinstance(text, str) else ""


def _sentence_pieces(path: str, raw: bytes) -> FolderVocabulary:
    """A SentencePiece model: pieces (1), the trainer's facts (2) and the normalizer's (3)."""
    tokens: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer: dict[int, object] = {}
    normalizer: dict[int, object] = {}
    try:
        for number, value in _message(raw):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_message(value))
                text, score, kind = piece.get(1, b""), piece.get(2, b"\0\0\0\0"), piece.get(3, 1)
                assert isinstance(text, bytes) and isinstance(score, bytes)
                tokens.append(text.decode())
                scores.append(struct.unpack("<f", score)[0])
                kinds.append(kind if isinstance(kind, int) else 1)
                if len(tokens) > MAX_VOCABULARY:
                    raise _damaged(path, f"it has more than {MAX_VOCABULARY:,} pieces")
            elif number in (2, 3) and isinstance(value, bytes):
                (trainer if number == 2 else normalizer).update(_message(value))
    except (ValueError, AssertionError, struct.error):
        raise _damaged(path, "it is no SentencePiece model and no list of ranks") from None
    kind = trainer.get(3, _UNIGRAM)
    has_prefix = bool(normalizer.get(3, 1))
    named = _named_pieces(trainer, tokens)
    if kind == _BPE:
        return _as_bpe(path, tokens, scores, kinds, normalizer, named)
    if kind != _UNIGRAM:
        raise _damaged(path, f"it is of SentencePiece's kind {kind}, neither unigram nor BPE")
    if _UNKNOWN not in kinds:
        raise _damaged(path, "it has no unknown piece")
    backend = tokenizers.Tokenizer(
        models.Unigram(
            list(zip(tokens, scores, strict=True)), kinds.index(_UNKNOWN), _BYTE in kinds
        )
    )
    prefix = [normalizers.Prepend(SPACE_MARK)] if has_prefix else []
    spaces = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = normalizers.Sequence([*_normalizers(normalizer), *prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_controls(backend, tokens, kinds)
    return FolderVocabulary(backend, named)


def _as_bpe(
    path: str,
    tokens: list[str],
    scores: list[float],
    kinds: list[int],
    normalizer: Mapping[int, object],
    named: Mapping[str, str],
) -> FolderVocabulary:
    """SentencePiece BPE; a GGUF file holds the same lists."""
    ids = {text: id for id, text in enumerate(tokens)}
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
    }
    if "unk_token" in named:
        metadata["tokenizer.ggml.unknown_token_id"] = ids[named["unk_token"]]
    backend, _ = GGUFVocabulary(path, metadata, "SentencePiece model").parts()
    steps = _normalizers(normalizer)
    if steps and backend.normalizer is not None:
        backend.normalizer = normalizers.Sequence([*steps, backend.normalizer])
    return FolderVocabulary(backend, named, add_bos="bos_token" in named)


def _normalizers(facts: Mapping[int, object]) -> list[normalizers.Normalizer]:
    """What SentencePiece does to a text before it looks for pieces."""
    steps: list[normalizers.Normalizer] = []
    rules = facts.get(2, b"")
    if isinstance(rules, bytes) and rules:
        steps.append(normalizers.Precompiled(rules))
    if facts.get(4, 1):
        steps.append(normalizers.Strip())
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    return steps


def _named_pieces(trainer: Mapping[int, object], tokens: Sequence[str]) -> dict[str, str]:
    """Names of the special tokens by the trainer's ids; -1 = none."""
    found: dict[str, str] = {}
    for name, number, default in (("unk", 40, 0), ("bos", 41, 1), ("eos", 42, 2), ("pad", 43, -1)):
        id = trainer.get(number, default)
        if isinstance(id, int) and 0 <= id < len(tokens):
            found[f"{name}_token"] = tokens[id]
    return found


def _add_controls(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]
) -> None:
    backend.add_tokens(
        [
            AddedToken(text, special=kind != _USER_DEFINED, normalized=False)
            for text, kind in zip(tokens, kinds, strict=True)
            if kind in (_UNKNOWN, 3) or (kind == _USER_DEFINED and SPACE_MARK not in text)
        ]
    )


def _message(raw: bytes) -> Iterator[tuple[int, object]]:
    """The fields of a protobuf message: (number, whole number or bytes).

    Raises:
        ValueError: the bytes are no message.
    """
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(raw, at)
            yield number, value - (1 << 64) if value >= 1 << 63 else value
            continue
        size = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            size, at = _varint(raw, at)
        elif not size:
            raise ValueError(f"wire type {wire}")
        if at + size > len(raw):
            raise ValueError("a field goes beyond the end")
        yield number, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(raw):
            raise ValueError("a number goes beyond the end")
        byte = raw[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
    raise ValueError("a number is too long")
