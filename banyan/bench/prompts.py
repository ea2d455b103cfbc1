"""Prompts of a benchmark, and the sources of their tokens.

A Lexicon draws token ids of a tokenizer, plain English words if there is no tokenizer, or bare ids
if only the size of the vocabulary is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Protocol

from banyan.base.errors import ConfigError
from banyan.tokenizer.tokenizer import Tokenizer

_TEXT = """time year people way day man thing woman life child world school state family student
    group country problem hand part place case week company system program question work number
    night point home water room mother area money story fact month lot right study book eye job
    word business issue side kind head house service friend father power hour game line end member
    law car city name team minute idea body back parent face level office door health person art
    war history party result change morning reason research girl guy moment air teacher force
    age policy process music market sense nation plan college interest death effect use class
    control care field role effort rate heart drug show leader light voice wife price report
    decision son view town road arm value building action season society tax player record paper
    space ground form event matter center couple site project activity star table need court oil
    cost industry figure street image phone data picture practice piece land product doctor wall
    worker news test movie north love support technology step baby computer type attention film
    tree source hair look window culture chance brother energy period course summer plant term
    letter condition choice rule south floor campaign material call economy hospital church risk
    fire future bank west sport board subject officer rest behavior fight top goal second bed
    order author blood agency nature color store sound"""

WORDS = tuple(_TEXT.split())
"""With a leading space, each is one token in common byte-pair vocabularies."""


@dataclass(frozen=True)
class Prompt:
    """One request of a benchmark.

    Attributes:
        text: "" when only ids are known.
        ids: None when only the text is known.
        length: tokens as intended; the server's own count is what the results use.
        arrival_s: when a trace sent it, from the start of the trace.
    """

    text: str
    ids: list[int] | None
    length: int
    output_len: int
    arrival_s: float = 0.0


class Lexicon(Protocol):
    """Draws words and spells them."""

    @property
    def has_text(self) -> bool: ...

    @property
    def has_ids(self) -> bool:
        """The words' numbers are token ids of the model."""
        ...

    def draw(self, random: Random, count: int) -> list[int]: ...
    def spell(self, words: Sequence[int]) -> str: ...
    def read(self, text: str) -> list[int]:
        """The words of `text`, for counting and cutting."""
        ...


class PlainWords:
    """English words; lengths in tokens are right to within a few."""

    has_text, has_ids = True, False

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(WORDS)}

    def draw(self, random: Random, count: int) -> list[int]:
        return random.choices(range(len(WORDS)), k=count)

    def spell(self, words: Sequence[int]) -> str:
        return " ".join(WORDS[w] for w in words)

    def read(self, text: str) -> list[int]:
        """Foreign text is taken as four characters to a token."""
        known = [self._numbers.get(word) for word in text.split()]
        if None not in known:
            return [number for number in known if number is not None]
        return [0] * max(1, round(len(text) / 4))


class BareIds:
    """Token ids, when only the size of the vocabulary is known."""

    has_text, has_ids = False, True

    def __init__(self, vocab_size: int) -> None:
        # The first ids of most vocabularies are control tokens and bytes.
        self._ids = range(min(1000, vocab_size // 2), vocab_size)

    def draw(self, random: Random, count: int) -> list[int]:
        return random.choices(self._ids, k=count)

    def spell(self, words: Sequence[int]) -> str:
        raise ConfigError(
            "these prompts need text, and only --vocab-size is known", hint="give --tokenizer"
        )

    def read(self, text: str) -> list[int]:
        return [0] * max(1, round(len(text) / 4))


class TokenWords:
    """Tokens of a tokenizer that are ordinary text.

    Args:
        any_id: draw from the whole vocabulary, not only from plain words.
    """

    has_text, has_ids = True, True

    def __init__(self, tokenizer: Tokenizer, any_id: bool = False) -> None:
        self._tokenizer = tokenizer
        plain = [] if any_id else [self._one_token(" " + word) for word in WORDS]
        plain = [id for id in plain if id is not None]
        if len(plain) < len(WORDS) // 2:
            special = tokenizer.special_ids
            plain = [i for i in range(tokenizer.vocab_size) if i not in special]
        self._ids: list[int] = [id for id in plain if id is not None]

    def draw(self, random: Random, count: int) -> list[int]:
        return random.choices(self._ids, k=count)

    def spell(self, words: Sequence[int]) -> str:
        return self._tokenizer.decode(words, skip_special_tokens=False)

    def read(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _one_token(self, word: str) -> int | None:
        ids = self._tokenizer.encode(word, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None


def prompt_of(
    lexicon: Lexicon, words: list[int], output_len: int, arrival_s: float = 0.0
) -> Prompt:
    text = lexicon.spell(words) if lexicon.has_text else ""
    return Prompt(text, words if lexicon.has_ids else None, len(words), output_len, arrival_s)
