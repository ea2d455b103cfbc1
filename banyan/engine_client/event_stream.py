"""EventStream: the events of one request on their way to whoever reads its answer."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from banyan.base.ids import RequestId
from banyan.messages.events import Failed, Finished, Tokens
from banyan.messages.requests import Generate
from banyan.requests.chunks import Chunks

StreamEvent = Tokens | Finished | Failed

TOKEN_BYTES = 4


class Owner(Protocol):
    """Who puts events into a stream."""

    def abort(self, request: RequestId) -> None: ...


class EventStream(Chunks[StreamEvent]):
    """The events of one request, in order; ends after its Finished or Failed.

    Args:
        owner: whoever has the request now.
        may_move: another engine may take the request while nothing of its answer is there.
    """

    def __init__(
        self, owner: Owner, generate: Generate, max_waiting: int, may_move: bool = False
    ) -> None:
        self.owner = owner
        self.request = generate.request
        self.num_prompt = len(generate.tokens) // TOKEN_BYTES
        self.tokens = self.num_prompt + generate.sampling.max_new_tokens
        """Prompt, and the most that may follow."""
        self.unanswered = generate if may_move else None
        """The request as long as it may run once more; None else."""
        self._max_waiting = max_waiting
        self._waiting: deque[StreamEvent] = deque()
        self._more: Callable[[], None] | None = None
        self.is_complete = False
        """The last event has been put."""
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        return not self._waiting and (self.is_complete or self._is_closed)

    @property
    def is_quiet(self) -> bool:
        return not (self._waiting or self.is_complete or self._is_closed)

    def take(self) -> StreamEvent | None:
        return self._waiting.popleft() if self._waiting else None

    def tell(self, more: Callable[[], None] | None) -> None:
        self._more = more

    def close(self) -> None:
        """Let go of the request; it is aborted if it still runs."""
        if self._is_closed:
            return
        self._is_closed = True
        self.unanswered = None
        self._waiting.clear()
        if self._more is not None:
            self._more()
        if not self.is_complete:
            self.owner.abort(self.request)

    def put(self, event: StreamEvent) -> None:
        """Take in an event (the client's side); one too many ends the stream and its request."""
        if self.is_complete or self._is_closed:
            return
        self.unanswered = None
        self._waiting.append(event)
        self.is_complete = not isinstance(event, Tokens)
        if not self.is_complete and len(self._waiting) > self._max_waiting:
            self._waiting[-1] = Failed(
                self.request,
                408,
                f"The reader is {self._max_waiting} events behind; the request was cancelled.",
                "slow_reader",
            )
            self.is_complete = True
            self.owner.abort(self.request)
        if self._more is not None:
            self._more()


class OpenStreams:
    """The streams of one engine, by request, until its last word on each."""

    def __init__(self) -> None:
        self._open: dict[RequestId, EventStream] = {}
        self.find: Callable[[RequestId], EventStream | None] = self._open.get
        self._queued: set[RequestId] = set()
        self.tokens = 0
        """Their prompts, and the most that may follow."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._open

    def all(self) -> list[EventStream]:
        return list(self._open.values())

    @property
    def num_queued(self) -> int:
        """Those that run or wait in the engine's queue for certain: neither may they wait for their
        constraint, nor has the engine been told to end them."""
        return len(self._queued)

    def add(self, stream: EventStream, is_queued: bool = True) -> None:
        self._open[stream.request] = stream
        self.tokens += stream.tokens
        if is_queued:
            self._queued.add(stream.request)

    def told_to_end(self, request: RequestId) -> None:
        """The engine lets go of it before it takes in what it is sent from here on."""
        self._queued.discard(request)

    def remove(self, request: RequestId) -> EventStream | None:
        stream = self._open.pop(request, None)
        if stream is not None:
            self.tokens -= stream.tokens
            self._queued.discard(request)
        return stream

    def end(self, ended: Sequence[EventStream], text: str, code: str) -> None:
        """Fail some of them."""
        for stream in ended:
            self.remove(stream.request)
            stream.put(Failed(stream.request, 503, text, code))

    def release(self) -> list[EventStream]:
        """Let go of all of them: the requests go to another engine."""
        released, self.tokens = self.all(), 0
        self._open.clear()
        self._queued.clear()
        return released
