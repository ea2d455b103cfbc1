"""Drafting: between the slot table and a drafter. What a step's rows sampled is cut to what stands,
told to the drafter, and answered with the drafts of the next rows.
"""

from array import array
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from banyan.messages.plan import Row, StepPlan
from banyan.runner.inputs import Batch
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
    """

    stands: np.ndarray
    cut: dict[int, int]
    drafts: list[bytes]


class Drafting:
    """
    Args:
        most: drafts after each sampled token.
    """

    def __init__(self, drafter: Drafter, table: SlotTable, most: int) -> None:
        self._drafter = drafter
        self._table = table
        self._most = most
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

    def verify(self, batch: Batch, sampled: Tensor, num_rows: int) -> Verified:
        """Enter into the table what stands of the sampled tokens, and draft what may follow.

        sampled: [outputs] int64; num_rows: of the plan.
        """
        tokens = sampled.tolist()  # sync: the next row begins where this one's answer ends
        stands = np.ones(len(tokens), bool)
        cut, drafts = dict[int, int](), [b""] * num_rows
        end = 0
        while end < len(tokens):
            at = int(batch.sampling[end])
            row, first = batch.rows[at], end
            end += row.drafts + 1
            guessed = self._table.drafts.get(row.slot, [])[: row.drafts]
            count = standing(guessed, tokens[first:end])
            stands[first + count : end] = False
            index = int(batch.indices[at])
            cut[index] = end - first - count
            known = self._table.known[row.slot]
            self._table.known[row.slot] = known + count
            if row.slot in self._joined:
                self._drafter.extend(row.slot, known, tokens[first : first + count])
                found = list(self._drafter.propose(row.slot, self._most))[: self._most]
                self._table.drafts[row.slot] = found
                drafts[index] = array("i", found).tobytes()
        return Verified(stands, cut, drafts)
