"""Drafting: between the slot table and a drafter. What a step's rows sampled is cut to what stands,
told to the drafter, and answered with the drafts of the next rows.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from banyan.base.draft_tree import is_chain, standing_path
from banyan.messages.control_ops import ControlOp
from banyan.messages.plan import Row, StepPlan
from banyan.model_config.model_config import STATE
from banyan.runner.batch import Batch
from banyan.runner.control_ops import Finish, RankReply
from banyan.runner.draft_trees import Compaction
from banyan.runner.forward import Forward
from banyan.runner.kvstore import KVStore
from banyan.runner.slots import SlotTable
from banyan.runner.speculative.base import Drafter, Tree


class TargetHiddenStates:
    """The step that ran last.

    Args:
        is_tapped: what drafts reads what comes to some layers, in the place of hidden states.
    """

    def __init__(self, is_tapped: bool = False) -> None:
        self._is_tapped = is_tapped
        self._forward: Forward | None = None
        self._offsets: dict[int, int] = {}
        self._paths: dict[int, list[int]] = {}

    def enter(self, batch: Batch, forward: Forward) -> None:
        self._forward = forward
        slots, offsets = batch.slots.tolist(), batch.offsets.tolist()
        self._offsets = dict(zip(slots, offsets, strict=False))
        self._paths = {}

    def stood(self, slot: int, path: list[int]) -> None:
        """Which tokens of a row that branched stand, one behind another."""
        self._paths[slot] = path

    def hidden(self, slots: Sequence[int], counts: Sequence[int]) -> Tensor:
        """What is read of the first tokens of some rows that stand; [sum of counts, width]."""
        assert self._forward is not None, "no step has run"
        firsts = [self._offsets[slot] for slot in slots]
        parts = [np.arange(at, at + count) for at, count in zip(firsts, counts, strict=True)]
        for i, slot in enumerate(slots):
            if slot in self._paths:
                parts[i] = firsts[i] + np.array(self._paths[slot][: counts[i]], np.int64)
        read = self._forward.tapped if self._is_tapped else self._forward.hidden
        return read(np.concatenate(parts))


class PageEndStates:
    """What pages keep of their last token.

    Args:
        pages: of the layer that reads them; layer, name: where in it they are kept.
        width: numbers of one token.
    """

    def __init__(self, table: SlotTable, pages: KVStore, layer: int, name: str, width: int) -> None:
        group = pages.group_of(layer)
        self._tables = table.pages[group]
        self._kept = pages.tensors(layer)[name].flatten(1)  # [num_pages, width and a rest]
        self._width = width
        self.page_size = pages.groups[group].page_size
        assert self._kept.shape[1] >= width

    def keep(self, slots: Sequence[int], positions: Sequence[int], states: Tensor) -> None:
        """Of tokens that are the last of their pages; states: [n, width]."""
        if slots:
            self._kept[self._at(slots, positions), : self._width] = states.to(self._kept.dtype)

    def of(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        """[n, width]"""
        return self._kept[self._at(slots, positions), : self._width]

    def _at(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        columns = torch.tensor(positions) // self.page_size
        return self._tables[torch.tensor(slots), columns].long()


def standing(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many of the sampled tokens stand behind a chain: the accepted drafts and one more.

    drafts: [n]; sampled: [n + 1], the token after the row's last known one and after each draft.
    """
    for i, draft in enumerate(drafts):
        if sampled[i] != draft:
            return i + 1
    return len(drafts) + 1


def standing_places(
    drafts: Sequence[int], parents: Sequence[int], sampled: Sequence[int]
) -> list[int]:
    """Which of the sampled tokens stand, in order; parents: as of drafts that branch, or empty."""
    if parents:
        return standing_path(drafts, parents, sampled)
    return list(range(standing(drafts, sampled)))


@dataclass
class Verified:
    """What a step's verification came to.

    Attributes:
        stands: [outputs] bool: the sampled token is one of the answer.
        cut: index in the plan -> how many of the row's last positions do not stand.
        places: [outputs]: the output whose token takes this one's place, where drafts branch.
        drafts: int32 ids per row of the plan: what the next row of its slot may verify.
        parents: as StepResult.parents.
        seconds: that drafting took.
    """

    stands: np.ndarray
    cut: dict[int, int]
    places: np.ndarray
    drafts: list[bytes] = field(default_factory=list[bytes])
    parents: list[bytes] = field(default_factory=list[bytes])
    seconds: float = 0.0


class Drafting:
    """
    Args:
        ran: what the drafter reads of the last step.
        store: whose states go back where drafts do not stand.
        compaction: None where drafts are chains.
        branching: longest path of drafts that branch, the newest token included; 0 = none do.
    """

    def __init__(
        self,
        drafter: Drafter,
        table: SlotTable,
        ran: TargetHiddenStates,
        store: KVStore | None = None,
        compaction: Compaction | None = None,
        branching: int = 0,
    ) -> None:
        self._drafter = drafter
        self._table = table
        self._ran = ran
        self._store = store if store is not None and store.rollback_checkpoints else None
        self._compaction = compaction
        self._branching = branching
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

    def prepare_flush(self, order: ControlOp) -> Finish:
        """Forget what requests have held; none runs."""

        def flush() -> RankReply:
            self._drafter.flush()
            return RankReply("Cache flushed.")

        return flush

    def verify(self, batch: Batch, sampled: Tensor | None) -> Verified:
        """Enter into the table what stands of the sampled tokens, and tell the drafter.

        sampled: [outputs] int64 on the host, because the next row begins where this one's answer
            ends; None where no row samples.
        """
        tokens = [] if sampled is None else sampled.tolist()
        verified = Verified(np.ones(len(tokens), bool), {}, np.arange(len(tokens)))
        moved: list[tuple[int, int, list[int]]] = []
        end = 0
        sampling = batch.sampling.tolist()
        while end < len(tokens):
            at = sampling[end]
            row, first = batch.rows[at], end
            end += row.drafts + 1
            if not row.drafts:  # most rows, where drafts are not worth it
                self._stand(row.slot, tokens[first:end])
                continue
            guessed = self._table.drafts.get(row.slot, [])[: row.drafts]
            parents = self._table.parents.get(row.slot, []) if at in batch.branches else []
            path = standing_places(guessed, parents[: row.drafts], tokens[first:end])
            count = len(path)
            verified.stands[first:end] = False
            verified.stands[np.add(path, first)] = True
            verified.places[first : first + count] = np.add(path, first)
            verified.cut[int(batch.indices[at])] = end - first - count
            known = self._table.known[row.slot]
            stood = [tokens[first + place] for place in path]
            if parents:
                self._settle(row.slot, known, path, stood, moved)
            self._stand(row.slot, stood)
        self._compact(moved)
        self._go_back(batch, verified)
        return verified

    def draft(self, batch: Batch, verified: Verified, num_rows: int) -> None:
        """Note what may follow; num_rows: of the plan."""
        began = time.perf_counter()
        verified.drafts, verified.parents = self._draft(batch, num_rows)
        verified.seconds = time.perf_counter() - began

    def _stand(self, slot: int, tokens: list[int]) -> None:
        """These follow what the slot holds."""
        known = self._table.known[slot]
        self._table.known[slot] = known + len(tokens)
        if slot in self._joined:
            self._drafter.extend(slot, known, tokens)

    def _settle(
        self,
        slot: int,
        known: int,
        path: list[int],
        stood: list[int],
        moved: list[tuple[int, int, list[int]]],
    ) -> None:
        """A row branched: its siblings were sampled to the same positions."""
        tokens = torch.tensor(stood, dtype=torch.int32)
        self._table.tokens[slot, known : known + len(stood)] = tokens
        self._ran.stood(slot, path)
        if path[-1] != len(path) - 1:
            moved.append((slot, known - 1, path))

    def _go_back(self, batch: Batch, verified: Verified) -> None:
        """States are what they were after the last token that stands."""
        store, pages, rollback_checkpoints = self._store, list[int](), list[int]()
        if store is None:
            return
        group = next(at for at, layout in enumerate(store.groups) if layout.kind == STATE)
        for at, (row, (before, drafts)) in enumerate(
            zip(batch.rows, batch.rollback_checkpoints.tolist(), strict=True)
        ):
            if cut := verified.cut.get(int(batch.indices[at]), 0):
                pages.append(int(self._table.pages[group][row.slot, 0]))
                rollback_checkpoints.append(store.first_rollback_checkpoint + before + drafts - cut)
        if pages:
            store.go_back(pages, rollback_checkpoints)

    def _compact(self, moved: Sequence[tuple[int, int, list[int]]]) -> None:
        if not moved:
            return
        assert self._compaction is not None, "this runner was opened for chains"
        slots: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        for slot, base, path in moved:
            for place, lies in enumerate(path):
                if place != lies:
                    slots.append(slot)
                    sources.append(base + lies)
                    targets.append(base + place)
        self._compaction.move(slots, sources, targets)

    def _draft(self, batch: Batch, num_rows: int) -> tuple[list[bytes], list[bytes]]:
        told, parents = [b""] * num_rows, [b""] * num_rows
        mine = [at for at, row in enumerate(batch.rows) if row.slot in self._joined]
        rows = [batch.rows[at] for at in mine]
        counts = [row.propose for row in rows]
        for at, row, found in zip(mine, rows, self._drafter.propose(rows, counts), strict=True):
            self._table.parents.pop(row.slot, None)
            if not row.propose or not isinstance(found, Tree) and not found:
                self._table.drafts[row.slot] = []
                continue
            index = int(batch.indices[at])
            tree = found if isinstance(found, Tree) else Tree(found, range(-1, len(found) - 1))
            drafts = list(tree.tokens)[: row.propose]
            follows = list(tree.parents)[: row.propose]
            self._table.drafts[row.slot] = drafts
            told[index] = array("i", drafts).tobytes()
            if not is_chain(follows):
                assert tree.depth < self._branching, "this runner was opened for shorter branches"
                self._table.parents[row.slot] = follows
                parents[index] = array("i", follows).tobytes()
        return told, parents if any(parents) else []
