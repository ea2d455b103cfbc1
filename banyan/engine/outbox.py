"""EventOutbox: decides which events each iteration of the loop sends to the client.

A request that is not streamed (`Generate.stream_interval` 0) gets its tokens a few times a second
instead of at every step: an event costs the client more than a step of a small model. Tokens that
were sent while their multi-step plan was still running are not sent again when it is committed.
"""

from collections.abc import Iterable, Sequence

import msgspec

from banyan.base.ids import RequestId
from banyan.messages.events import Event, Failed, Finished, Tokens
from banyan.messages.requests import Generate

ENDS = (Finished, Failed)
HOLD_S = 0.02
"""Longest delay of a token. The client sees stop strings this much later, and tokens computed until
then are wasted."""


class EventOutbox:
    """Events of one engine on their way to the client."""

    def __init__(self) -> None:
        self._held: dict[RequestId, list[Tokens]] = {}
        """Held tokens of each live request that is not streamed."""
        self._early: dict[RequestId, int] = {}
        """Number of output tokens sent, for requests whose running plan has sent some early."""
        self._num_held = 0
        self._since_s = 0.0
        """When the first held event arrived."""

    def expect(self, message: Generate) -> None:
        """Register a request before its first token."""
        if message.stream_interval == 0:
            self._held[message.request] = []

    def filter(self, events: Sequence[Event], now: float) -> list[Event]:
        """The events to send now, among `events` and held ones; in order for each request."""
        sent: list[Event] = []
        for event in events:
            if isinstance(event, Tokens):
                event = self._rest_of(event)
                if event is None or self._holds(event, now):
                    continue
                sent += self._release(event.request)
            elif isinstance(event, ENDS):
                sent += self._release(event.request)
                self._held.pop(event.request, None)
                self._early.pop(event.request, None)
            sent.append(event)
        if self._num_held and now - self._since_s >= HOLD_S:
            for request in self._held:
                sent += self._release(request)
        return sent

    def early(self, events: Sequence[Tokens]) -> list[Event]:
        """The new ones among tokens of a plan that still runs; they are sent at once."""
        sent: list[Event] = []
        for event in events:
            end = event.first + len(event.tokens) // 4
            if end > (sent_until := self._early.get(event.request, event.first)):
                sent.append(_from(event, sent_until))
                self._early[event.request] = end
        return sent

    def is_early(self, request: RequestId) -> bool:
        """Whether tokens of a request were sent before they are committed."""
        return request in self._early

    def _rest_of(self, event: Tokens) -> Tokens | None:
        """The part of committed tokens that has not been sent; None if all of it has."""
        sent_until = self._early.get(event.request)
        if sent_until is None:
            return event
        if event.first + len(event.tokens) // 4 >= sent_until:
            del self._early[event.request]
        rest = _from(event, sent_until)
        has_more = rest.scores or rest.hidden or rest.vector
        return rest if rest.tokens or has_more else None

    def _holds(self, event: Tokens, now: float) -> bool:
        """Hold tokens if possible. The first ones go at once: they mark the end of the prefill."""
        held = self._held.get(event.request)
        if held is None or not event.first or event.scores or event.hidden or event.vector:
            return False
        if not self._num_held:
            self._since_s = now
        held.append(event)
        self._num_held += 1
        return True

    def _release(self, request: RequestId) -> Iterable[Tokens]:
        held = self._held.get(request)
        if not held:
            return ()
        first, last = held[0], held[-1]
        merged = Tokens(
            request,
            first.first,
            b"".join(event.tokens for event in held),
            cached_tokens=last.cached_tokens,
            stored_tokens=last.stored_tokens,
            cache_miss=last.cache_miss,
        )
        self._num_held -= len(held)
        held.clear()
        return (merged,)


def _from(event: Tokens, first: int) -> Tokens:
    """The event without the tokens before index `first` of the output."""
    skipped = max(0, first - event.first)
    tokens = event.tokens[4 * skipped :]
    return msgspec.structs.replace(event, first=event.first + skipped, tokens=tokens)
