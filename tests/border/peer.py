"""The server that computes prompts, as a runner meets it: rooms that come late, whose pages fail or
are missing, and that are lost at any time."""

from array import array
from collections import Counter
from random import Random

from banyan.kv_cache.cache import TOKEN_BYTES
from banyan.messages.disaggregation import (
    CloseTransfer,
    FindTransfer,
    KVTransferEvent,
    KVTransferOp,
    PrefillResult,
    ReceiveTransfer,
    TransferFailed,
    TransferFound,
)
from banyan.messages.plan import RowScores, transfer_position
from banyan.messages.requests import Generate
from tests.border.oracle import BARRED, Answer, HashStory, mix, start_of

LOST = 0.03
MISSING = 0.05


class FakePeer:
    """
    Args:
        unit: tokens of one.
        failed: sampling seeds of requests whose room is lost.
    """

    def __init__(
        self, block_size: int, random: Random, failed: set[int], seen: Counter[str]
    ) -> None:
        self.requests: dict[bytes, Generate] = {}
        """By room."""
        self._block_size = block_size
        self._given: dict[bytes, int] = {}
        """Tokens whose pages are there, by room."""
        self._random = random
        self._failed = failed
        self._seen = seen
        self._sought: list[bytes] = []
        self._taken: list[bytes] = []

    @property
    def is_quiet(self) -> bool:
        return not (self._sought or self._taken)

    def execute(self, orders: list[KVTransferOp]) -> None:
        for order in orders:
            match order:
                case FindTransfer():
                    self._sought.append(order.transfer_id)
                case ReceiveTransfer():
                    self._taken.append(order.transfer_id)
                case CloseTransfer():
                    for rooms in (self._sought, self._taken):
                        if order.transfer_id in rooms:
                            rooms.remove(order.transfer_id)
                case _:
                    raise AssertionError(f"a core that takes says {order}")

    def report(self) -> KVTransferEvent | None:
        """What has become of one of the rooms, in any order."""
        waiting = self._sought or self._taken
        if self._sought and self._taken and self._random.random() < 0.5:
            waiting = self._taken
        if not waiting:
            return None
        room = waiting.pop(self._random.randrange(len(waiting)))
        handoff = self._handoff(room)
        if handoff is None or self._random.random() < LOST:
            self._failed.add(self.requests[room].sampling.seed)
            self._seen["lost rooms"] += 1
            return TransferFailed(room, 503, "injected")
        if waiting is self._sought:
            whole = self._random.choice(
                (1, self._block_size, 3 * self._block_size)
            )  # tokens of its pages
            self._given[room] = len(self.requests[room].tokens) // TOKEN_BYTES // whole * whole
            return TransferFound(room, self._given[room])
        self._seen["handoffs"] += 1
        return handoff

    def page(self, key: bytes, page_tokens: int) -> list[int] | None:
        """Hashes of the positions of a page; None where it is missing."""
        room, first = transfer_position(key)
        if self._random.random() < MISSING:
            return None
        generate = self.requests[room]
        hashes = [start_of(generate.namespace)]
        for token in array("i", generate.tokens):
            hashes.append(mix(hashes[-1], token))
        assert first + page_tokens <= self._given[room], "a page that the other server has not"
        return hashes[first + 1 : first + 1 + page_tokens]

    def _handoff(self, room: bytes) -> PrefillResult | None:
        """None where the prompt's own server finds no token that is allowed."""
        generate = self.requests[room]
        answer = Answer(generate, HashStory(generate))
        tokens = array("i")
        if generate.sampling.max_new_tokens:
            tokens.append(answer.output(0))
            if tokens[0] == BARRED:
                return None
        end = answer.prompt_len + len(tokens)
        scored = range(max(1, generate.score_from), end) if generate.score_from >= 0 else range(0)
        values = array("f", [answer.score(position) for position in scored])
        scores = [RowScores(-1, scored[0], values.tobytes())] if values else []
        return PrefillResult(room, tokens.tobytes(), scores)
