"""Detokenizer: the text of one growing answer, token by token.

Holds back the bytes of a character that is not complete. What all pushes and the finish return,
joined, is what Tokenizer.decode returns for all ids, however they were split.
"""

import codecs
from collections.abc import Sequence

from banyan.tokenizer.stop_strings import TextOptions
from banyan.tokenizer.tokenizer import Tokenizer

PROMPT_TAIL_TOKENS = 8
"""Tokens of the prompt's end: enough to complete a character split between prompt and answer."""


class Detokenizer:
    """Incremental decoding of one request.

    Args:
        prompt_tail: the last tokens of the text that the answer continues, so that a first space
            and the rest of a split character come out right; empty = a text of its own.
        options: whether special tokens are text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail: Sequence[int], options: TextOptions
    ) -> None:
        self._pieces = tokenizer.pieces
        self._texts = tokenizer.pieces.texts
        skips = options.skip_special_tokens
        self._skipped = tokenizer.special_ids - options.shown if skips else frozenset()
        self._held = b""
        """The beginning of a character whose rest has not come."""
        tail = [id for id in prompt_tail[-PROMPT_TAIL_TOKENS:] if id not in self._skipped]
        self._decode(self._pieces.bytes_of(tail))
        self._strips = self._pieces.strips_first_space and not tail

    def push(self, ids: Sequence[int]) -> str:
        """The text that became final with these tokens."""
        if len(ids) == 1 and not (self._held or self._strips):  # as nearly always
            [id] = ids
            if id in self._skipped:
                return ""
            if (text := self._texts[id]) is not None:
                return text
        if not self._skipped.isdisjoint(ids):
            ids = [id for id in ids if id not in self._skipped]
        text = self._decode(self._pieces.bytes_of(ids))
        return self._strip(text) if self._strips else text

    def finish(self) -> str:
        """What was held back: U+FFFD for a character that never became complete, or nothing."""
        text = self._held.decode("utf-8", "replace")
        self._held = b""
        return self._strip(text) if self._strips else text

    def _decode(self, piece: bytes) -> str:
        """As an incremental decoder, whose layers take longer than the decoding."""
        data = self._held + piece
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def _strip(self, text: str) -> str:
        if not text:
            return text
        self._strips = False
        return text.removeprefix(" ")
