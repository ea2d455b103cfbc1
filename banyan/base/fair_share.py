"""FairShare, TurnQueue and Turns: bounded amounts and turns that callers share fairly.

A caller is a digest of a key; b"" stands for all callers of a server without keys, and for the
server itself. A bounded amount is divided so that the load of one caller is never the refusal of
another:

- What can be taken back (stored responses, idle sessions) is taken from the `heaviest` holder.
- What cannot (files, bodies, open requests) is given as long as an eighth stays free. A caller gets
  a part of the last eighth only if it then holds no more than is left.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")

CALLER: ContextVar[bytes] = ContextVar("caller", default=b"")
"""The caller of the request that the current task works for."""

_PART = 8
"""One part in this many is kept for callers that hold little."""


class FairShare:
    """Counts who holds how much of an amount.

    Args:
        most: the whole amount.
        reserved: the part that is kept for callers that hold little; None = an eighth, or 1.
    """

    def __init__(self, most: int, reserved: int | None = None) -> None:
        self.most = most
        self._reserved = reserved
        self.total = 0
        self._held: Counter[bytes] = Counter()

    def held_by(self, caller: bytes) -> int:
        return self._held[caller]

    def fits(self, caller: bytes, amount: int = 1) -> bool:
        """Whether `caller` may take so much more."""
        left = self.most - self.total - amount
        if left < 0:
            return False
        reserved = max(1, self.most // _PART) if self._reserved is None else self._reserved
        is_shared = bool(caller) and left < reserved
        return not is_shared or self._held[caller] + amount <= left + 1

    def take(self, caller: bytes, amount: int = 1) -> None:
        self.total += amount
        self._held[caller] += amount

    def give_back(self, caller: bytes, amount: int = 1) -> None:
        self.total -= amount
        self._held[caller] -= amount
        if not self._held[caller]:
            del self._held[caller]

    def heaviest(self, but: bytes = b"", amount: int = 0) -> bytes:
        """The caller that holds most, if `but` is counted with `amount` more. Of equals, `but`."""
        held: Mapping[bytes, int] = self._held + Counter({but: amount})
        return max(held, key=lambda caller: (held[caller], caller == but), default=but)


class TurnQueue(Generic[T]):
    """Items that wait; callers take turns, and a caller's items keep their order.

    Args:
        out: the items that may be out at the same time.
    """

    def __init__(self, out: FairShare) -> None:
        self.out = out
        self._waiting: dict[bytes, deque[T]] = {}
        """Callers in the order of their turns."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, caller: bytes, item: T) -> None:
        self._waiting.setdefault(caller, deque()).append(item)

    def remove(self, caller: bytes, item: T) -> None:
        """Take an item out of the queue; no effect if it is not there."""
        queue = self._waiting.get(caller, deque())
        if item in queue:
            queue.remove(item)
        if not queue:
            self._waiting.pop(caller, None)

    def get(self) -> tuple[bytes, T] | None:
        """Take the next item out, until `out.give_back`; None if none may go."""
        for caller in sorted(self._waiting, key=self.out.held_by):
            if self.out.fits(caller):
                queue = self._waiting.pop(caller)
                item = queue.popleft()
                if queue:
                    self._waiting[caller] = queue  # its next turn comes after all others
                self.out.take(caller)
                return caller, item
        return None


class Turns:
    """Places that tasks of one event loop wait for; callers take turns.

    Args:
        places: how many there are; a negative number = any.
    """

    def __init__(self, places: FairShare) -> None:
        self._queue: TurnQueue[asyncio.Future[None]] = TurnQueue(places)

    @property
    def inside(self) -> int:
        return self._queue.out.total

    def is_free(self, caller: bytes) -> bool:
        """Whether `enter` does not wait."""
        places = self._queue.out
        return places.most < 0 or places.fits(caller)

    async def enter(self, caller: bytes) -> None:
        """Take a place, which `leave` gives back; nothing is taken if the wait is cancelled."""
        if self.is_free(caller):
            self._queue.out.take(caller)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(caller, turn)
        try:
            await turn  # the task that leaves lets this one in
        except BaseException:
            self._queue.remove(caller, turn)
            if turn.done() and not turn.cancelled():
                self.leave(caller)  # let in and cancelled at the same time
            raise

    def leave(self, caller: bytes) -> None:
        self._queue.out.give_back(caller)
        while (found := self._queue.get()) is not None:
            next_caller, turn = found
            if turn.done():
                self._queue.out.give_back(next_caller)
            else:
                turn.set_result(None)
