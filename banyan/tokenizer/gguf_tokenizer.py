"""The tokenizer inside a GGUF file, rebuilt for the `tokenizers` library.

Two families: "gpt2" (byte-level BPE, the file names the pre-tokenizer) and "llama" (SentencePiece
BPE with byte fallback). The split patterns are facts of the models; llama.cpp defines their names.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from banyan.base.errors import ModelError
from banyan.base.log import logger, printable
from banyan.formats.gguf import GGUFFile
from banyan.tokenizer.tokenizer import SPACE_MARK, Tokenizer, TokenizerFacts, build_backend

MAX_VOCABULARY = 1 << 20
MAX_MERGES = 1 << 21
MAX_TOKEN_CHARS = 1024

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_SYMBOLS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}",
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|"
    rf"{_SPACES}"
)
_DIGITS_GPT2 = (r"\p{N}", _GPT2)

SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "phi-2": (_GPT2,),
    "olmo": (_GPT2,),
    "mpt": (_GPT2,),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "command-r": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "exaone": _DIGITS_GPT2,
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "chatglm-bpe": (_LLAMA3,),
    "glm4": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "stablelm2": (_QWEN2,),
    "deepseek-v3": _DEEPSEEK_V3,
    "gpt-4o": (_GPT4O,),
    "llama4": (_GPT4O,),
    "minimax-m2": (_GPT4O,),
    "hunyuan": (_QWEN2,),
    "hunyuan-dense": _DEEPSEEK_V3,
    "bailingmoe": (_BAILING,),
    "bailingmoe2": (_BAILING,),
}
"""Pre-tokenizer name -> patterns, applied one after the other to what the one before has split."""

_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_COMPOSED_NAMES = ("qwen2", "deepseek-r1-qwen")
"""Vocabularies made for text in Unicode form NFC."""

_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
)
"""GGUF carries no generation configuration; control tokens with these texts end a turn."""


def load_gguf_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer of a GGUF file.

    Raises:
        ModelError: the file is unreadable, or its tokenizer is of an unknown kind or inconsistent.
    """
    return Tokenizer(*_read(path))


def _read(path: str) -> tuple[tokenizers.Tokenizer, TokenizerFacts]:
    """Read and release step by step, so that temporary data does not fragment the memory."""
    with GGUFFile.open(path) as file:
        return GGUFVocabulary(path, file.metadata).parts()


class GGUFVocabulary:
    """The tokenizer keys of a GGUF file, checked.

    Args:
        kind: of the file, for messages.
    """

    def __init__(self, path: str, metadata: Mapping[str, object], kind: str = "GGUF file") -> None:
        self._path, self._kind = path, kind
        self._metadata = metadata
        self._tokens = self._strings("tokens", MAX_VOCABULARY)
        if not self._tokens:
            raise self._error("has no tokenizer.ggml.tokens", "use a GGUF file with a tokenizer")
        if (longest := max(map(len, self._tokens))) > MAX_TOKEN_CHARS:
            raise self._error(f"has a token of {longest:,} characters, limit {MAX_TOKEN_CHARS:,}")
        # A text that appears twice belongs to its first id.
        last = len(self._tokens) - 1
        self._ids = dict(zip(reversed(self._tokens), range(last, -1, -1), strict=True))
        kinds = cast(list[int], self._list("token_type", int) or [1] * len(self._tokens))
        if len(kinds) != len(self._tokens):
            raise self._error(f"has {len(kinds):,} token types for {len(self._tokens):,} tokens")
        self._kinds = kinds

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(*self.parts())

    def parts(self) -> tuple[tokenizers.Tokenizer, TokenizerFacts]:
        family = self._metadata.get("tokenizer.ggml.model")
        if family not in ("gpt2", "llama"):
            raise self._error(
                f"has a tokenizer of the kind {printable(repr(family))}",
                "use a file whose tokenizer.ggml.model is gpt2 or llama",
            )
        split = self._split_name() if family == "gpt2" else ""
        make = (lambda: self._byte_level(split)) if split else self._sentence_pieces
        backend = build_backend(self._path, lambda: self._with_added(make()))
        named = {
            f"{name}_token": self._tokens[id]
            for name, key in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("unk", "unknown"),
                ("pad", "padding"),
            )
            if (id := self._id(key)) is not None
        }
        facts = TokenizerFacts(
            source=self._path,
            named=named,
            eos_ids=self._eos_ids(),
            add_bos=self._flag("add_bos_token", family == "llama" or split in _LLAMA3_NAMES),
            add_eos=self._flag("add_eos_token", False),
            chat_templates=self._chat_templates(),
        )
        return backend, facts

    def _byte_level(self, split: str) -> tokenizers.Tokenizer:
        merges = [self._pair(m) for m in self._strings("merges", MAX_MERGES)]
        backend = tokenizers.Tokenizer(
            models.BPE(vocab=self._ids, merges=merges, ignore_merges=split in _LLAMA3_NAMES)
        )
        if split in _COMPOSED_NAMES:
            backend.normalizer = normalizers.NFC()
        steps = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in SPLITS[split]]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentence_pieces(self) -> tokenizers.Tokenizer:
        unknown = self._id("unknown")
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab=self._ids,
                merges=self._merges_by_score(),
                unk_token=None if unknown is None else self._tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        has_prefix = self._flag("add_space_prefix", True)
        spaces = normalizers.Replace(" ", SPACE_MARK)
        prefix = [normalizers.Prepend(SPACE_MARK)] if has_prefix else []
        backend.normalizer = normalizers.Sequence([*prefix, spaces])
        strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return backend

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """SentencePiece merges the neighbours whose union scores best; here as BPE merges."""
        scores = cast(list[float], self._list("scores", float))
        if len(scores) != len(self._tokens):
            raise self._error(f"has {len(scores):,} scores for {len(self._tokens):,} tokens")
        ids = self._ids
        ranked: list[tuple[float, int, int, str, str]] = []
        for piece, id in ids.items():
            if self._kinds[id] in (_UNKNOWN, _CONTROL):
                continue
            for i in range(1, len(piece)):
                left, right = ids.get(piece[:i]), ids.get(piece[i:])
                if left is not None and right is not None:
                    ranked.append((-scores[id], left, right, piece[:i], piece[i:]))
                    if len(ranked) > MAX_MERGES:
                        raise self._error(f"allows more than {MAX_MERGES:,} merges")
        ranked.sort()
        return [(left, right) for _, _, _, left, right in ranked]

    def _with_added(self, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        added = [
            AddedToken(text, special=kind != _USER_DEFINED, normalized=False)
            for text, kind in zip(self._tokens, self._kinds, strict=True)
            # A user-defined run of spaces is spelled with marks and is reached through merges.
            if kind in (_UNKNOWN, _CONTROL) or (kind == _USER_DEFINED and SPACE_MARK not in text)
        ]
        backend.add_tokens(added)
        return backend

    def _split_name(self) -> str:
        name = self._metadata.get("tokenizer.ggml.pre")
        if name is None:
            logger(__name__).warning(
                "gguf file=%s has no tokenizer.ggml.pre: splitting words as llama.cpp's default",
                printable(self._path),
            )
            return "default"
        if not isinstance(name, str) or name not in SPLITS:
            raise self._error(
                f"has the unknown pre-tokenizer {printable(repr(name))}",
                f"supported are: {', '.join(SPLITS)}",
            )
        return name

    def _eos_ids(self) -> tuple[int, ...]:
        stated = [self._id(key) for key in ("eos", "eot", "eom")]
        known = [self._ids.get(text) for text in _TURN_ENDS]
        controls = [id for id in known if id is not None and self._kinds[id] == _CONTROL]
        return tuple(dict.fromkeys([*(id for id in stated if id is not None), *controls]))

    def _chat_templates(self) -> dict[str, str]:
        prefix = "tokenizer.chat_template"
        found: dict[str, str] = {}
        for key, value in self._metadata.items():
            if isinstance(value, str) and (key == prefix or key.startswith(prefix + ".")):
                found[key[len(prefix) + 1 :] or "default"] = value
        return found

    def _id(self, name: str) -> int | None:
        id = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if id is None:
            return None
        if not isinstance(id, int) or not 0 <= id < len(self._tokens):
            raise self._error(
                f"gives the {name} token the id {id}, the vocabulary has {len(self._tokens):,}"
            )
        return id

    def _flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        return value if isinstance(value, bool) else default

    def _list(self, name: str, kind: type) -> Sequence[object]:
        values = self._metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(values, list) or any(type(v) is not kind for v in values):
            raise self._error(f"has a tokenizer.ggml.{name} that is not a list of {kind.__name__}")
        return values

    def _strings(self, name: str, limit: int) -> list[str]:
        values = cast(list[str], self._list(name, str))
        if len(values) > limit:
            raise self._error(f"has {len(values):,} {name}, limit {limit:,}")
        return values

    def _pair(self, merge: str) -> tuple[str, str]:
        left, space, right = merge.partition(" ")
        if not left or not space or not right or " " in right:
            raise self._error(f"has the merge {printable(merge)!r}, which is not a pair")
        return left, right

    def _error(self, text: str, hint: str = "convert the model to GGUF again") -> ModelError:
        return ModelError(f"{self._kind} {printable(self._path)!r} {text}", hint)
