"""Detokenizer: the text of one growing answer, token by token.

Holds back the bytes of an incomplete character. The texts of all pushes and of `finish` together
equal Tokenizer.decode of all ids.
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
        prompt_tail: the last tokens of the text that the answer continues, needed for the first
            space and for a character split between prompt and answer; empty = a separate text.
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
        """The first bytes of an incomplete character."""
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
        """The held-back text: U+FFFD for an incomplete character, else nothing."""
        text = self._held.decode("utf-8", "replace")
        self._held = b""
        return self._strip(text) if self._strips else text

    def _decode(self, piece: bytes) -> str:
        """Decode UTF-8 incrementally; codecs' own incremental decoder is slower."""
        data = self._held + piece
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def _strip(self, text: str) -> str:
        if not text:
            return text
        self._strips = False
        return text.removeprefix(" ")
