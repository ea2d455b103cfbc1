"""Spans: the stretches of a prompt that are given by content instead of tokens.

A prompt is a row of int32 ids. At the places of a span the ids are negative words of the digest of
its content (`place_ids`), so every key that is made of ids also identifies the content. The runner
puts one feature row of the content at each place, in place of a token's embedding. How content
becomes features is the business of the runner's towers; here it has only a digest and sizes.
"""

import hashlib
import math
from array import array
from collections.abc import Sequence

import msgspec

DIGEST_BYTES = 32
"""SHA-256."""
TOKEN_BYTES = 4
CONTENT_UNKNOWN = "content_unknown"
"""Code of the failure of a request that names a content whose data the engine does not have."""
_SIGNS = slice(3, None, 4)
"""The bytes with the signs of little-endian words."""


class ContentKind:
    """What `Content.data` holds."""

    FEATURES = "features"
    """float32 [rows, width]: feature rows that the client gives."""
    PATCHES = "patches"
    """uint8 [patches, temporal_patch · 3 · patch · patch], in the order of the tower."""
    MEL = "mel"
    """float16 [windows, bands, frames]: mel spectrograms of consecutive windows."""

    ALL = (FEATURES, PATCHES, MEL)


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """Consecutive places of a prompt that take one feature row each.

    Ordinary tokens between the feature rows of a content (row separators) are outside: such a
    content has several spans, with growing offsets.
    """

    first: int
    """First place in the prompt."""
    count: int
    digest: bytes
    """Digest of the content."""
    offset: int = 0
    """First feature row of the content that the span takes."""
    shape: tuple[int, int, int] = (1, 1, 0)
    """(t, h, w) of the merged grid, for positions with axes; (1, 1, 0) = a line of `count`, with
    the positions of text."""
    kind: str = ContentKind.FEATURES
    is_mutual: bool = False
    """The places attend to each other in both directions."""
    token: int | None = None
    """Id that the model has at the places of a content that it reads by cross attention, from
    every later place too; None = the places take the feature rows."""

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def grid(self) -> tuple[int, int, int]:
        """`shape`, with the line spelled out."""
        return self.shape if self.shape[2] else (1, 1, self.count)


class Content(msgspec.Struct, frozen=True, omit_defaults=True):
    """What becomes the feature rows of one or more spans."""

    digest: bytes
    kind: str
    data: bytes
    """b"" = the engine has it."""
    grid: tuple[int, int, int]
    """(t, h, w) in patches before merging; (windows, bands, frames with sound) for MEL; (1, 1,
    rows) for FEATURES."""
    rows: int
    """Feature rows that it becomes."""


def place_ids(digest: bytes, count: int, offset: int = 0) -> "array[int]":
    """The ids at the places of a span, all negative; int32.

    Args:
        offset: of the span: its places have the words of the feature rows that they take.
    """
    words = bytearray(hashlib.shake_128(digest).digest((offset + count) * TOKEN_BYTES))
    words[_SIGNS] = bytes(byte | 0x80 for byte in words[_SIGNS])
    return array("i", bytes(words[offset * TOKEN_BYTES :]))


def ids_with_spans(tokens: bytes, spans: Sequence[Span]) -> bytes:
    """The int32 ids of a prompt, with the ids of each span's places put in."""
    ids = array("i", tokens)
    for span in spans:
        ids[span.first : span.end] = place_ids(span.digest, span.count, span.offset)
    return ids.tobytes()


def check_spans(tokens: bytes, spans: Sequence[Span], contents: Sequence[Content]) -> None:
    """Check that spans and contents fit a prompt.

    Raises:
        ValueError: what does not fit, in words for a log: the sender is a program.
    """
    ids = array("i", tokens)
    known = {content.digest: content for content in contents}
    for content in contents:
        if len(content.digest) != DIGEST_BYTES or content.kind not in ContentKind.ALL:
            raise ValueError(f"a content of kind {content.kind!r} has no valid digest or kind")
        if content.rows < 1 or min(content.grid) < 1:
            raise ValueError(f"a content has {content.rows} feature rows of grid {content.grid}")
    end = 0
    for span in spans:
        content = known.get(span.digest)
        if span.first < end or span.count < 1 or span.end > len(ids):
            raise ValueError(
                f"the span of places {span.first} … {span.end - 1} is not within {end} … "
                f"{len(ids) - 1}"
            )
        if content is None or content.kind != span.kind:
            raise ValueError(f"the span at place {span.first} names a content that did not come")
        if span.offset < 0 or span.offset + span.count > content.rows:
            raise ValueError(
                f"the span at place {span.first} takes feature rows {span.offset} … "
                f"{span.offset + span.count - 1}; its content has {content.rows}"
            )
        if math.prod(span.grid) != span.count or min(span.grid) < 1:
            raise ValueError(
                f"the span at place {span.first} has {span.count} places, shape {span.shape}"
            )
        if ids[span.first : span.end] != place_ids(span.digest, span.count, span.offset):
            raise ValueError(f"the ids from place {span.first} are not the ids of the content")
        end = span.end
    inside = sum(span.count for span in spans)
    if sum(id < 0 for id in ids) != inside:
        raise ValueError("the prompt has negative ids outside of its spans")
