"""Contents on the fake device: features are there when all pieces have run, and nobody reads them
before, nor what a failed step has left of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

from banyan.messages.plan import NewContent, PieceFailure, PlacedSpan, Row, StepPlan
from banyan.messages.spans import Content, ContentKind, Span, place_ids
from banyan.scheduler.spans import ContentLimits
from tests.border.laws import require

CONTENTS = 6


def content_of(number: int) -> Content:
    rows = (9, 1, 4, 6, 3, 5)[number]
    kind = ContentKind.FEATURES if number in (1, 4) else ContentKind.PATCHES
    return Content(sha256(bytes([number])).digest(), kind, b"", (1, 1, rows), rows)


def random_spans(
    random: Random,
    prompt: list[int],
    limits: ContentLimits,
    chunk_tokens: int,
    may_be_mutual: bool = True,
) -> tuple[list[int], tuple[Span, ...], tuple[Content, ...]]:
    """The prompt with contents in place of some of its tokens."""
    prompt, spans, contents = list(prompt), list[Span](), dict[bytes, Content]()
    first = random.choice((0, 1, 4, 7))
    for _ in range(random.choice((1, 1, 2, 3))):
        content = content_of(random.randrange(CONTENTS))
        offset = random.randrange(content.rows) if random.random() < 0.2 else 0
        count = content.rows - offset
        if first + count > len(prompt) or content.rows > limits.pool_rows:
            continue
        is_mutual = may_be_mutual and content.rows == 6 and count <= chunk_tokens
        prompt[first : first + count] = place_ids(content.digest, count, offset).tolist()
        spans.append(
            Span(first, count, content.digest, offset, kind=content.kind, is_mutual=is_mutual)
        )
        contents[content.digest] = content
        first += count + random.choice((0, 1, 3))
    return prompt, tuple(spans), tuple(contents.values())


@dataclass
class _Made:
    content: NewContent
    done: int = 0
    blocks: int = 1
    poisoned: int = 0
    """A failed step that had a piece of it."""


@dataclass
class FakeFeatures:
    """
    Attributes:
        fails: whether a piece fails by chance.
        blame: called with the digest of a content that failed.
    """

    limits: ContentLimits
    fails: Callable[[], bool]
    blame: Callable[[bytes], None]
    made: dict[int, _Made] = field(default_factory=dict[int, _Made])
    failed: set[int] = field(default_factory=set[int])

    def enter(self, plan: StepPlan, is_broken: bool) -> list[PieceFailure]:
        where, spoilt = f"step {plan.step}", list[PieceFailure]()
        for number in plan.forget:
            self.made.pop(number, None)
            self.failed.discard(number)
        for content in plan.contents:
            require(content.content not in self.made, f"{where}: content comes twice: {content}")
            tower = self.limits.tower_of(content.kind)
            self.made[content.content] = _Made(content, 0, 1 if tower is None else tower.blocks)
            self.failed.discard(content.content)
        for piece in plan.pieces:
            if piece.content in self.failed:
                continue
            require(piece.content in self.made, f"{where}: {piece} of no content")
            made = self.made[piece.content]
            right = piece.blocks > 0 and made.done == piece.first_block
            require(right and made.done + piece.blocks <= made.blocks, f"{where}: {piece}")
            made.done += piece.blocks
            if is_broken:
                made.poisoned = plan.step
            elif self.fails():
                del self.made[piece.content]
                self.failed.add(piece.content)
                self.blame(made.content.digest)
                spoilt.append(PieceFailure(piece.content, "injected (piece)"))
        held = sum(made.content.rows for made in self.made.values() if made.done)
        require(held <= self.limits.pool_rows, f"{where}: {held} feature rows are kept")
        return spoilt

    def read(self, where: str, row: Row, start: int, spans: list[PlacedSpan]) -> int | None:
        """What a row finds: 0 = its features, a step = what that has poisoned, None = a content
        that has failed."""
        end, found = start + row.count, 0
        for span in spans:
            last = span.first + span.count
            if last <= start or end <= span.first:
                continue
            if span.content in self.failed:
                return None
            made = self.made.get(span.content)
            is_there = made is not None and made.done == made.blocks
            require(is_there, f"{where}: no features at {span.first} … {last - 1}")
            is_whole = start <= span.first and last <= end
            require(is_whole or not span.is_mutual, f"{where}: cuts {span}")
            assert made is not None
            found = max(found, made.poisoned)
        return found
