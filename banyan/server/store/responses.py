"""ResponseStore: stored responses in memory, limited in number and size.

The oldest finished response of the caller that has most is dropped first. None outlives the server.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import orjson

from banyan.base.errors import RequestError
from banyan.base.fair_share import FairShare
from banyan.server.errors import Json

MAX_RESPONSES = 1000
MAX_BYTES = 256 << 20


@dataclass
class StoredResponse:
    """One response with its input.

    Attributes:
        show: returns the current response in the form of the API.
        given: its own input items.
        before: items of the conversation that it continued.
        owner: the credential that has made it.
        events: its stream so far, for a background response that is streamed.
        work: what runs it in the background.
    """

    show: Callable[[], Json]
    id: str
    given: list[Json]
    before: list[Json]
    owner: bytes = b""
    events: list[Json] | None = None
    work: asyncio.Task[None] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    num_bytes: int = 0

    @property
    def status(self) -> str:
        return str(self.show()["status"])

    @property
    def is_over(self) -> bool:
        return self.status not in ("queued", "in_progress")

    @property
    def conversation(self) -> list[Json]:
        """All items up to the end of this response; later responses share them."""
        output = self.show()["output"]
        assert isinstance(output, list)
        return [*self.before, *self.given, *output]


class ResponseStore:
    """Responses by owner and id, oldest first. Callers find only their own."""

    def __init__(self) -> None:
        self._kept: dict[tuple[bytes, str], StoredResponse] = {}
        self._number = FairShare(MAX_RESPONSES)
        self._bytes = FairShare(MAX_BYTES)

    def __len__(self) -> int:
        return len(self._kept)

    def has(self, id: str, owner: bytes) -> bool:
        return (owner, id) in self._kept

    def find(self, id: str, owner: bytes, param: str = "response_id") -> StoredResponse:
        """The response; RequestError 404 if there is none."""
        if (owner, id) not in self._kept:
            raise RequestError(
                f"Response with id {id[:80]!r} not found.",
                param=param,
                status=404,
                code="not_found",
                hint=f"The latest {MAX_RESPONSES} are kept, in memory",
            )
        return self._kept[owner, id]

    def keep(self, stored: StoredResponse) -> None:
        """Store a response, or update the size of one that has grown; drops the oldest if needed.

        Raises:
            RequestError: 429; all stored responses are still running.
        """
        self._forget(stored)
        owner = stored.owner
        # A running response cannot be dropped, so it leaves room for other callers.
        while self._number.total >= self._number.most or not (
            stored.is_over or self._number.fits(owner)
        ):
            self._drop_oldest(self._number, owner)
        stored.num_bytes = len(orjson.dumps((stored.show(), stored.given, stored.events)))
        self._kept[owner, stored.id] = stored
        self._number.take(owner)
        self._bytes.take(owner, stored.num_bytes)
        while self._bytes.total > self._bytes.most and len(self._kept) > 1:
            self._drop_oldest(self._bytes, owner)

    def remove(self, id: str, owner: bytes) -> None:
        """Delete a response; RequestError 404 if there is none."""
        self._forget(self.find(id, owner))

    def _drop_oldest(self, share: FairShare, asker: bytes) -> None:
        """Drop a finished response of the caller that has most of `share`, or else of `asker`."""
        for owner in (share.heaviest(asker, 1), asker):
            mine = (r for r in self._kept.values() if r.owner == owner and r.is_over)
            if (oldest := next(mine, None)) is not None:
                self._forget(oldest)
                return
        raise RequestError(
            f"{share.held_by(asker)} responses of this caller are running in the background",
            status=429,
            code="too_many_responses",
        )

    def _forget(self, stored: StoredResponse) -> None:
        gone = self._kept.pop((stored.owner, stored.id), None)
        if gone is not None:
            self._number.give_back(gone.owner)
            self._bytes.give_back(gone.owner, gone.num_bytes)
