"""Cuts pages of one size out of pages of another size.

A transferred page has the same bytes for any number of ranks, which cut it by heads
(`runner/rank_pages.py`). Here it is cut by tokens: it consists of blocks of parts
[lines, tokens, width], and a page of another size has the same parts with other numbers of tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Block:
    """Repeated parts of a page.

    Attributes:
        repeats: number of repetitions; of a tensor with heads, the heads.
        parts: (lines, width) of each part [lines, tokens, width]; width in bytes.
    """

    repeats: int
    parts: tuple[tuple[int, int], ...]

    @property
    def token_bytes(self) -> int:
        return self.repeats * sum(lines * width for lines, width in self.parts)


@dataclass(frozen=True)
class PageForm:
    """Layout of the pages of one group.

    Attributes:
        tokens: tokens of a page; 0 = the page holds a state and is never cut.
        blocks: None = pages cannot be cut.
    """

    tokens: int
    blocks: tuple[Block, ...] | None = None

    @property
    def size_bytes(self) -> int:
        return self.tokens * sum(block.token_bytes for block in self.blocks or ())

    def takes(self, tokens: int) -> bool:
        """Whether pages of `tokens` tokens can be cut from these."""
        return tokens == self.tokens or self.blocks is not None and tokens > 0

    def sources(self, first: int, tokens: int) -> Sequence[int]:
        """First tokens of the pages that hold `tokens` tokens from `first` on."""
        if tokens == self.tokens:
            return (first,)
        return range(first // self.tokens * self.tokens, first + tokens, self.tokens)

    def overlap(self, source: int, first: int, tokens: int) -> int:
        """Tokens of the page at `source` among `tokens` tokens from `first` on."""
        return min(source + self.tokens, first + tokens) - max(source, first)

    def cut(self, pages: Mapping[int, np.ndarray], first: int, tokens: int) -> np.ndarray:
        """A page of `tokens` tokens from `first` on.

        pages: all its sources by their first tokens, uint8.
        """
        if tokens == self.tokens:
            return pages[first]
        target = np.empty(replace(self, tokens=tokens).size_bytes, np.uint8)
        for at, page in pages.items():
            low, count = max(at, first), self.overlap(at, first, tokens)
            here, there = low - at, low - first
            views = self._views(page, self.tokens), self._views(target, tokens)
            for source, into in zip(*views, strict=True):
                into[:, :, there : there + count] = source[:, :, here : here + count]
        return target

    def _views(self, page: np.ndarray, tokens: int) -> list[np.ndarray]:
        """[repeats, lines, tokens, width] of each part of each block."""
        found, at = list[np.ndarray](), 0
        for block in self.blocks or ():
            size, first = tokens * block.token_bytes, 0
            whole = page[at : at + size].reshape(block.repeats, -1)
            for lines, width in block.parts:
                last = first + lines * tokens * width
                found.append(whole[:, first:last].reshape(block.repeats, lines, tokens, width))
                first = last
            at += size
        assert at == len(page), f"a page of {len(page)} bytes, not {at}"
        return found
