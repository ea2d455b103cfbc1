"""Drafting: between the slot table and a drafter. What a step's rows sampled is cut to what stands,
told to the drafter, and answered with the drafts of the next rows.
"""

import time
from array import array
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from banyan.messages.orders import Order
from banyan.messages.plan import Row, StepPlan
from banyan.runner.inputs import Batch
from banyan.runner.orders import Finish, Said
from banyan.runner.slots import SlotTable
from banyan.runner.speculative.base import Drafter
from banyan.runner.speculative.verify import standing


@dataclass(frozen=True)
class Verified:
    """What a step's verification came to.

    Attributes:
        stands: [outputs] bool: the sampled token is one of the answer.
        cut: index in the plan -> how many of the row's last positions do not stand.
        drafts: int32 ids per row of the plan: what the next row of its slot may verify.
        seconds: that drafting took.
    """

    stands: np.ndarray
    cut: dict[int, int]
    drafts: list[bytes]
    seconds: float = 0.0


class Drafting:
    def __init__(self, drafter: Drafter, table: SlotTable) -> None:
        self._drafter = drafter
        self._table = table
        self._joined: set[int] = set()

    def enter(self, plan: StepPlan) -> None:
        """Leaves and joins, which the table has taken."""
        for slot in plan.leaves:
            if slot in self._joined:
                self._joined.remove(slot)
                self._drafter.leave(slot)
        for join in plan.joins:
            # Of a prompt that is given as embeddings the tokens are placeholders.
            if self._table.holds(join.slot) and not join.embeds:
                self._joined.add(join.slot)
                self._drafter.join(join.slot, list(array("i", join.tokens)), join.namespace)

    def give(self, row: Row) -> None:
        """A row has brought tokens."""
        if row.slot in self._joined:
            self._drafter.extend(row.slot, row.start, list(array("i", row.given)))

    def prepare_flush(self, order: Order) -> Finish:
        """Forget what requests have held; none runs."""

        def flush() -> Said:
            self._drafter.flush()
            return Said("Cache flushed.")

        return flush

    def verify(self, batch: Batch, sampled: Tensor | None, num_rows: int) -> Verified:
        """Enter into the table what stands of the sampled tokens, and draft what may follow.

        sampled: [outputs] int64 on the host, because the next row begins where this one's answer
            ends; None where no row samples; num_rows: of the plan.
        """
        tokens = [] if sampled is None else sampled.tolist()
        stands = np.ones(len(tokens), bool)
        cut = dict[int, int]()
        end = 0
        while end < len(tokens):
            at = int(batch.sampling[end])
            row, first = batch.rows[at], end
            end += row.drafts + 1
            guessed = self._table.drafts.get(row.slot, [])[: row.drafts]
            count = standing(guessed, tokens[first:end])
            stands[first + count : end] = False
            cut[int(batch.indices[at])] = end - first - count
            known = self._table.known[row.slot]
            self._table.known[row.slot] = known + count
            if row.slot in self._joined:
                self._drafter.extend(row.slot, known, tokens[first : first + count])
        began = time.perf_counter()
        drafts = self._draft(batch, num_rows)
        return Verified(stands, cut, drafts, time.perf_counter() - began)

    def _draft(self, batch: Batch, num_rows: int) -> list[bytes]:
        told = [b""] * num_rows
        mine = [at for at, row in enumerate(batch.rows) if row.slot in self._joined]
        rows = [batch.rows[at] for at in mine]
        counts = [row.propose for row in rows]
        for at, row, found in zip(mine, rows, self._drafter.propose(rows, counts), strict=True):
            drafts = list(found)[: row.propose]
            self._table.drafts[row.slot] = drafts
            told[int(batch.indices[at])] = array("i", drafts).tobytes()
        return told
