"""EventStream: the events of one request, from the engine client to the reader of the answer."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from banyan.base.fair_share import FairShare
from banyan.base.ids import RequestId
from banyan.messages.events import Failed, Finished, Tokens
from banyan.messages.requests import Generate
from banyan.requests.generation import Chunks

StreamEvent = Tokens | Finished | Failed

TOKEN_BYTES = 4


class Owner(Protocol):
    """The engine client that puts events into a stream."""

    def abort(self, request: RequestId) -> None: ...


class EventStream(Chunks[StreamEvent]):
    """The events of one request, in order; ends after its Finished or Failed.

    Args:
        owner: the client that has the request now.
        may_move: another engine may take the request while it has no output.
    """

    def __init__(
        self, owner: Owner, generate: Generate, max_waiting: int, may_move: bool = False
    ) -> None:
        self.owner = owner
        self.request = generate.request
        self.caller = generate.caller
        self.num_prompt = len(generate.tokens) // TOKEN_BYTES
        self.tokens = self.num_prompt + generate.sampling.max_new_tokens
        """Prompt length plus the longest possible output."""
        self.unanswered = generate if may_move else None
        """The request while it may run again elsewhere; else None."""
        self._max_waiting = max_waiting
        self._waiting: deque[StreamEvent] = deque()
        self._more: Callable[[], None] | None = None
        self.is_complete = False
        """The last event has arrived."""
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        return not self._waiting and (self.is_complete or self._is_closed)

    @property
    def is_quiet(self) -> bool:
        return not (self._waiting or self.is_complete or self._is_closed)

    def take(self) -> StreamEvent | None:
        return self._waiting.popleft() if self._waiting else None

    def on_more(self, more: Callable[[], None] | None) -> None:
        self._more = more

    def close(self) -> None:
        """Release the request; abort it if it still runs."""
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
        """Add an event (called by the client); an overflow ends the stream and aborts the
        request."""
        if self.is_complete or self._is_closed:
            return
        self.unanswered = None
        self._waiting.append(event)
        self.is_complete = not isinstance(event, Tokens)
        if not self.is_complete and len(self._waiting) > self._max_waiting:
            self._waiting[-1] = Failed(
                self.request,
                408,
                f"The reader is {self._max_waiting} events too slow; the request was cancelled.",
                "slow_reader",
            )
            self.is_complete = True
            self.owner.abort(self.request)
        if self._more is not None:
            self._more()


class OpenStreams:
    """The streams of one engine by request, until the last event of each."""

    def __init__(self) -> None:
        self._open: dict[RequestId, EventStream] = {}
        self.find: Callable[[RequestId], EventStream | None] = self._open.get
        self._queued: set[RequestId] = set()
        self._open_by, self._queued_by = FairShare(0), FairShare(0)
        self.tokens = 0
        """Sum of prompt lengths and longest possible outputs."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._open

    def all(self) -> list[EventStream]:
        return list(self._open.values())

    @property
    def num_queued(self) -> int:
        """Requests that certainly run or wait in the engine's queue: not waiting for a grammar, not
        being aborted."""
        return len(self._queued)

    def fits(self, caller: bytes, most: int) -> bool:
        """Whether `caller` may open one more request, if at most `most` may be open."""
        self._open_by.most = most
        return self._open_by.fits(caller)

    def queue_fits(self, caller: bytes, most: int) -> bool:
        """Like `fits`, of the requests that `num_queued` counts."""
        self._queued_by.most = most
        return self._queued_by.fits(caller)

    def add(self, stream: EventStream, is_queued: bool = True) -> None:
        self._open[stream.request] = stream
        self.tokens += stream.tokens
        self._open_by.take(stream.caller)
        if is_queued:
            self._queued.add(stream.request)
            self._queued_by.take(stream.caller)

    def mark_ending(self, request: RequestId) -> None:
        """Mark a request whose end was requested: the engine frees it before it reads later
        messages."""
        if request in self._queued:
            self._queued.remove(request)
            self._queued_by.give_back(self._open[request].caller)

    def remove(self, request: RequestId) -> EventStream | None:
        if request not in self._open:
            return None
        self.mark_ending(request)
        stream = self._open.pop(request)
        self.tokens -= stream.tokens
        self._open_by.give_back(stream.caller)
        return stream

    def end(self, ended: Sequence[EventStream], text: str, code: str) -> None:
        """Fail these streams."""
        for stream in ended:
            self.remove(stream.request)
            stream.put(Failed(stream.request, 503, text, code))

    def release(self) -> list[EventStream]:
        """Remove and return all streams: their requests go to another engine."""
        released = self.all()
        for stream in released:
            self.remove(stream.request)
        return released
