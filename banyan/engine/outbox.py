"""Outbox: what goes to the front with each round of the loop, in few frames where nobody waits.

A request whose reader takes nothing before its end (`Generate.stream_interval` 0) has its tokens
sent a few times a second instead of at every step: each event costs the front more than a small
model's step.
One whose tokens are told while their plan still runs does not get them again. Knows no link.
"""

from collections.abc import Iterable, Sequence

import msgspec

from banyan.base.ids import RequestId
from banyan.messages.events import Event, Failed, Finished, Tokens
from banyan.messages.requests import Generate

ENDS = (Finished, Failed)
HOLD_S = 0.02
"""The front sees stop texts so much later at most, and as many tokens are computed in vain."""


class Outbox:
    """Of one engine."""

    def __init__(self) -> None:
        self._patient: dict[RequestId, list[Tokens]] = {}
        """Live requests whose tokens may be held, with those that are."""
        self._ahead: dict[RequestId, int] = {}
        """Output tokens that have been sent of those whose plan still runs."""
        self._num_held = 0
        self._since_s = 0.0
        """When the first event that is held came."""

    def expect(self, message: Generate) -> None:
        """A request comes in."""
        if message.stream_interval == 0:
            self._patient[message.request] = []

    def pass_on(self, events: Sequence[Event], now: float) -> list[Event]:
        """What of `events`, and of earlier ones, is to be sent; of each request in order."""
        sent: list[Event] = []
        for event in events:
            if isinstance(event, Tokens):
                event = self._rest_of(event)
                if event is None or self._holds(event, now):
                    continue
                sent += self._release(event.request)
            elif isinstance(event, ENDS):
                sent += self._release(event.request)
                self._patient.pop(event.request, None)
                self._ahead.pop(event.request, None)
            sent.append(event)
        if self._num_held and now - self._since_s >= HOLD_S:
            for request in self._patient:
                sent += self._release(request)
        return sent

    def foretell(self, events: Sequence[Tokens]) -> list[Event]:
        """What is new of tokens whose plan still runs; it is sent at once."""
        sent: list[Event] = []
        for event in events:
            end = event.first + len(event.tokens) // 4
            if end > (ahead := self._ahead.get(event.request, event.first)):
                sent.append(_from(event, ahead))
                self._ahead[event.request] = end
        return sent

    def is_ahead(self, request: RequestId) -> bool:
        """Whether more has been sent of a request than is decided."""
        return request in self._ahead

    def _rest_of(self, event: Tokens) -> Tokens | None:
        """What has not been sent of decided tokens; None when that is nothing."""
        ahead = self._ahead.get(event.request)
        if ahead is None:
            return event
        if event.first + len(event.tokens) // 4 >= ahead:
            del self._ahead[event.request]
        rest = _from(event, ahead)
        has_more = rest.scores or rest.hidden or rest.vector
        return rest if rest.tokens or has_more else None

    def _holds(self, event: Tokens, now: float) -> bool:
        """The first tokens go at once: they tell how long the prompt took."""
        held = self._patient.get(event.request)
        if held is None or not event.first or event.scores or event.hidden or event.vector:
            return False
        if not self._num_held:
            self._since_s = now
        held.append(event)
        self._num_held += 1
        return True

    def _release(self, request: RequestId) -> Iterable[Tokens]:
        held = self._patient.get(request)
        if not held:
            return ()
        first, last = held[0], held[-1]
        joined = Tokens(
            request,
            first.first,
            b"".join(event.tokens for event in held),
            cached_tokens=last.cached_tokens,
            stored_tokens=last.stored_tokens,
            cache_miss=last.cache_miss,
        )
        self._num_held -= len(held)
        held.clear()
        return (joined,)


def _from(event: Tokens, first: int) -> Tokens:
    """The same without the tokens before index `first` of the output."""
    skipped = max(0, first - event.first)
    tokens = event.tokens[4 * skipped :]
    return msgspec.structs.replace(event, first=event.first + skipped, tokens=tokens)
