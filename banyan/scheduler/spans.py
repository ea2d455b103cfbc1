"""Contents: the features that spans of prompts need, and the work that makes them.

A content is *sent* to the runner when its first piece is planned, *ready* when all its pieces are
planned (pieces run before the rows of their plan), and then stays until its rows are needed for
another one. A row never runs over a span whose content is not ready. Features are counted in rows;
pieces are charged against the step's token budget, so decoding never waits for longer than a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from banyan.base.errors import RequestError
from banyan.base.ids import NO_STEP, RequestId, StepId
from banyan.messages.plan import NewContent, Piece, PlacedSpan, encode_spans
from banyan.messages.requests import Generate
from banyan.messages.spans import Content, ContentKind, Span, check_spans
from banyan.scheduler.request import RUNNING, Request
from banyan.scheduler.step_plan_builder import StepPlanBuilder

LEAST_PLACES = 4
"""A cached prefix ends inside a span only after so many of its places: fewer ids are too few bits
to say which content it was."""


class TowerWork(msgspec.Struct, frozen=True):
    """
    Attributes:
        kind: of the contents that it reads.
        blocks: of the tower.
        patch_work, pair_work: multiply-adds of a block for each patch or mel frame, and for each
            pair of them in one frame or window.
    """

    kind: str
    blocks: int
    patch_work: int = 0
    pair_work: int = 0


class ContentLimits(msgspec.Struct, frozen=True):
    """
    Attributes:
        pool_rows: feature rows that are kept at the same time; 0 = prompts have no spans.
        towers: what makes features here; of other kinds only clients give them.
        token_work: multiply-adds of the model for one token, in which pieces are charged.
        is_cross: decoding reads features too, so running requests keep theirs.
    """

    pool_rows: int = 0
    towers: tuple[TowerWork, ...] = ()
    token_work: int = 1
    is_cross: bool = False

    def tower_of(self, kind: str) -> TowerWork | None:
        """What makes features of contents of a kind; None = the client does."""
        return next((tower for tower in self.towers if tower.kind == kind), None)

    def cost(self, content: Content) -> int:
        """What one block costs, in tokens."""
        tower = self.tower_of(content.kind)
        if tower is None:
            return 0
        times, height, width = content.grid
        if tower.kind == ContentKind.MEL:
            height = 1
        work = tower.patch_work + tower.pair_work * height * width
        return -(-times * height * width * work // max(1, self.token_work))


@dataclass(eq=False)
class ContentItem:
    """One content that a request has, or whose features are kept."""

    number: int
    content: Content
    blocks: int
    users: dict[RequestId, Request] = field(default_factory=dict[RequestId, Request])
    done: int = 0
    """Blocks whose pieces are planned."""
    is_sent: bool = False
    step: StepId = NO_STEP
    """Of its newest piece."""
    read_by: StepId = NO_STEP
    """The newest step with a row over it."""
    used: int = 0
    """Larger = used later."""

    @property
    def is_ready(self) -> bool:
        return self.done == self.blocks


class SpanContents:
    """
    Attributes:
        items: contents by digest, of requests and those whose features are kept.
        forgotten: numbers for the next plan's `forget`.
        worked: the requests that pieces of the next plan are for, and their cost in tokens.
        dropped: digests whose data is of no use any more; some may have come again since.
    """

    def __init__(self, limits: ContentLimits, chunk_tokens: int, whole_prompts: bool) -> None:
        self._limits = limits
        self._chunk_tokens = chunk_tokens
        self._whole_prompts = whole_prompts
        self.items: dict[bytes, ContentItem] = {}
        self._numbers = 0
        self._ticks = 0
        self.forgotten: list[int] = []
        self.worked: list[tuple[Request, int]] = []
        self.dropped: list[bytes] = []

    # -- requests -----------------------------------------------------------------------------

    def check(self, generate: Generate) -> None:
        """Raise RequestError when the spans of a request cannot be served."""
        try:
            check_spans(generate.tokens, generate.spans, generate.contents)
        except ValueError as error:
            raise RequestError(f"The prompt is not in order: {error}") from None
        for content in generate.contents:
            known = self.items.get(content.digest)
            if known is not None and not _is_alike(known.content, content):
                raise RequestError("The content has the digest of another one")
            is_given = content.kind == ContentKind.FEATURES
            if not is_given and self._limits.tower_of(content.kind) is None:
                raise RequestError(f"This model does not read {content.kind}", code="not_available")
        rows = [content.rows for content in generate.contents]
        most = sum(rows) if self._whole_prompts else max(rows, default=0)
        if most > self._limits.pool_rows:
            raise RequestError(
                f"A content becomes {most} feature rows; {self._limits.pool_rows} are kept at most",
                code="content_too_large",
                hint="Send it smaller.",
            )
        longest = max((span.count for span in generate.spans if span.is_mutual), default=0)
        if longest > self._chunk_tokens:
            raise RequestError(
                f"A content of {longest} tokens that see each other must fit into one step of "
                f"{self._chunk_tokens}",
                code="content_too_large",
                hint="Raise --chunked-prefill-size.",
            )

    def add(self, request: Request) -> None:
        """A request has been queued."""
        for content in request.generate.contents:
            item = self.items.get(content.digest)
            if item is None:
                self._numbers += 1
                tower = self._limits.tower_of(content.kind)
                bare = msgspec.structs.replace(content, data=b"")
                item = ContentItem(self._numbers, bare, 1 if tower is None else tower.blocks)
                self.items[content.digest] = item
            item.users[request.id] = request

    def drop(self, request: Request) -> None:
        """A request has ended."""
        for content in request.generate.contents:
            item = self.items.get(content.digest)
            if item is None:
                continue
            item.users.pop(request.id, None)
            if not item.users and not item.is_ready:
                self._remove(item)

    def refuse(self, generate: Generate) -> None:
        """A request was refused: what came with it is of no use, unless others have it too."""
        self.dropped += [content.digest for content in generate.contents]

    def take_dropped(self) -> list[bytes]:
        """Drain the digests whose data is of no use any more."""
        dropped, self.dropped = self.dropped, []
        return [digest for digest in dropped if digest not in self.items]

    def placed(self, request: Request) -> bytes:
        """The spans of a request for its Join."""
        spans = [
            PlacedSpan(
                first=span.first,
                count=span.count,
                content=self.items[span.digest].number,
                offset=span.offset,
                shape=span.shape,
                is_mutual=span.is_mutual,
                token=-1 if span.token is None else span.token,
            )
            for span in request.generate.spans
        ]
        return encode_spans(spans)

    def spoil(self, number: int) -> list[Request]:
        """The runner could not make the features of a content; returns the requests that have
        it."""
        item = next((item for item in self.items.values() if item.number == number), None)
        if item is None:
            return []
        users = list(item.users.values())
        self._give_up(item)
        return users

    # -- planning -----------------------------------------------------------------------------

    def reach(self, request: Request, start: int, end: int) -> int:
        """Where a row that would run positions start … end - 1 must end: before the first span
        whose features are missing, and never inside of a mutual one, which may make it longer."""
        for span in _after(request.generate.spans, start):
            if span.first >= end:
                break
            if not self.items[span.digest].is_ready:
                return max(start, span.first)
            if span.is_mutual and end < span.end:
                return span.end if span.first <= start else span.first
        return end

    def on_row(self, request: Request, start: int, end: int, step: StepId) -> None:
        """A row over positions start … end - 1 has been planned."""
        for span in _after(request.generate.spans, start):
            if span.first < end:
                self.items[span.digest].read_by = step

    def prepare(
        self, request: Request, start: int, builder: StepPlanBuilder, running: Sequence[Request]
    ) -> None:
        """Plan pieces for the spans from `start` on, as far as the step's budget goes.

        Args:
            running: all running requests, whose features are not given up for a waiting one.
        """
        for span in _after(request.generate.spans, start):
            item = self.items[span.digest]
            self._ticks += 1
            item.used = self._ticks
            if item.is_ready:
                continue
            blocks = self._affordable(item, builder)
            if not blocks or not self._has_room(item, request, start, span, builder.step, running):
                return
            if not item.is_sent:
                builder.contents.append(_as_new(item))
                item.is_sent = True
            builder.pieces.append(Piece(item.number, item.done, blocks))
            cost = blocks * self._limits.cost(item.content)
            builder.budget = max(0, builder.budget - cost)
            self.worked.append((request, cost))
            item.done += blocks
            item.step = builder.step
            if not item.is_ready and not self._whole_prompts:
                return

    def _affordable(self, item: ContentItem, builder: StepPlanBuilder) -> int:
        """Blocks of an item that fit the step's budget; at least one if it is the first piece."""
        left, cost = item.blocks - item.done, self._limits.cost(item.content)
        if not cost:
            return left
        least = int(not builder.pieces and builder.budget > 0)
        return min(left, max(least, builder.budget // cost))

    def _has_room(
        self,
        item: ContentItem,
        request: Request,
        start: int,
        span: Span,
        step: StepId,
        running: Sequence[Request],
    ) -> bool:
        """Make room for the rows of an item, unless it has it already. What a row or a piece of
        this very step works on stays.

        Features that other requests wait to run over are given up only for a running request of
        higher rank, so the first of the running ones always gets on.
        """
        if item.done:
            return True
        held = [each for each in self.items.values() if each.done]
        missing = sum(each.content.rows for each in held) + item.content.rows
        missing -= self._limits.pool_rows
        if missing <= 0:
            return True
        kept = {
            other.digest
            for other in _after(request.generate.spans, start)
            if other.first < span.first
        }
        is_running = request.state == RUNNING
        for other in running:
            is_first = self._limits.is_cross or not is_running or other.rank < request.rank
            if other is not request and is_first:
                kept |= {s.digest for s in _after(other.generate.spans, other.planned)}
        if not is_running:
            waiting = {u.rank: u for each in held for u in each.users.values()}
            for rank, other in waiting.items():
                if other is not request and other.state != RUNNING and rank < request.rank:
                    kept |= {s.digest for s in other.generate.spans}
        free = [
            each
            for each in held
            if each.content.digest not in kept and step not in (each.read_by, each.step)
        ]
        for each in sorted(free, key=lambda each: each.used):
            missing -= each.content.rows
            self._give_up(each)
            if missing <= 0:
                return True
        return False

    # -- losing features ----------------------------------------------------------------------

    def forget_since(self, step: StepId) -> None:
        """Forget what the pieces of `step` and of later ones have made: the step failed, or the
        tower has other weights."""
        for item in list(self.items.values()):
            if item.is_sent and item.step >= step:
                self._give_up(item)

    def check_counts(self, alive: Iterable[Request]) -> None:
        """Raise AssertionError when rows or users are counted wrongly."""
        rows = sum(item.content.rows for item in self.items.values() if item.done)
        assert rows <= self._limits.pool_rows, f"{rows} feature rows of {self._limits.pool_rows}"
        users = {request.id for item in self.items.values() for request in item.users.values()}
        assert users <= {request.id for request in alive}, "a content of a request that has ended"
        for item in self.items.values():
            assert item.users or item.is_ready, "a content without requests and features"
            assert not item.done or item.is_sent, "a piece of a content that was not sent"

    def _give_up(self, item: ContentItem) -> None:
        """Drop the features of an item; it stays while requests have it."""
        if not item.users:
            self._remove(item)
            return
        self.forgotten.append(item.number)
        item.done, item.is_sent, item.step = 0, False, NO_STEP

    def _remove(self, item: ContentItem) -> None:
        if item.is_sent:
            self.forgotten.append(item.number)
        self.dropped.append(item.content.digest)
        del self.items[item.content.digest]


def last_end(spans: Sequence[Span], end: int) -> int:
    """Where a cached prefix of a prompt may end, at most `end`: never inside of a mutual span, nor
    after too few places of any span (LEAST_PLACES)."""
    for span in spans:
        if span.first >= end:
            break
        least = max(LEAST_PLACES, span.count if span.is_mutual else 0)
        if min(end, span.end) - span.first < least:
            return span.first
    return end


def _after(spans: Sequence[Span], start: int) -> Iterable[Span]:
    """The spans that places from `start` on are in or read."""
    return (span for span in spans if span.end > start or span.token is not None)


def _is_alike(one: Content, other: Content) -> bool:
    return (one.kind, one.grid, one.rows) == (other.kind, other.grid, other.rows)


def _as_new(item: ContentItem) -> NewContent:
    content = item.content
    return NewContent(item.number, content.digest, content.kind, content.grid, content.rows)
