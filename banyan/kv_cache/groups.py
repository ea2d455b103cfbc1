"""CacheGroup: layers with the same page geometry and the same rule for which positions are kept.

`runner/kvstore.py` holds the tensors of the pages.
"""

from dataclasses import dataclass
from math import lcm

from banyan.model_config.model_config import FULL, STATE, WINDOW


@dataclass(frozen=True)
class CacheGroup:
    """Geometry of one group on one rank.

    Attributes:
        kind: FULL | WINDOW | STATE.
        page_tokens: tokens per page; for STATE the distance between checkpoints.
        num_pages: pages in the pool, including the padding page 0.
        window: positions that a WINDOW layer reads, including its own.
    """

    kind: str
    page_tokens: int
    num_pages: int
    window: int = 0

    def __post_init__(self) -> None:
        assert self.kind in (FULL, WINDOW, STATE), self.kind
        assert self.page_tokens > 0 and self.num_pages > 1
        assert (self.window > 0) == (self.kind == WINDOW)

    def pages_for(self, tokens: int) -> int:
        """Pages for `tokens` positions of one request, nothing shared, nothing released."""
        return 1 if self.kind == STATE else -(-tokens // self.page_tokens)

    def first_read(self, start: int) -> int:
        """Lowest position that a row starting at `start` reads in a WINDOW group."""
        return max(0, start - self.window + 1)

    def first_needed(self, block_size: int, blocks: int) -> int:
        """Index of the first block whose pages a prefix of `blocks` blocks needs in this group."""
        if self.kind == WINDOW:
            return self.first_read(blocks * block_size) // block_size
        return 0 if self.kind == FULL else max(0, blocks - 1)

    def peak_pages(self, tokens: int, chunk: int) -> int:
        """Most pages a request of `tokens` positions needs at once, in rows of at most `chunk`."""
        if self.kind != WINDOW:
            return self.pages_for(tokens)
        return min(self.pages_for(tokens), self.pages_for(self.window + chunk) + 1)


def common_block_size(groups: tuple[CacheGroup, ...]) -> int:
    """Tokens per radix node: a multiple of every group's page, so that a node has whole pages."""
    return lcm(*(g.page_tokens for g in groups))
