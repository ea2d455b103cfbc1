"""Drafting: verifies the drafts of a step, and asks the drafter for the next ones.

A verify row runs the newest token and its drafts, a chain or a tree, so it has logits after each of
them. A token is sampled from each by the request's own rules: penalties, masks and biases as after
those drafts, and the random number of its position. That token depends only on the logits, the
parameters, the seed and the position (ops/sampling.py).

A draft is accepted if it equals the token sampled after its parent, and its parent is accepted. So
the accepted tokens are exactly those that sampling token by token would give, greedy or not.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from banyan.base.draft_tree import accepted_path, is_chain
from banyan.messages.control_ops import ControlOp
from banyan.messages.plan import Row, StepPlan
from banyan.model_config.model_config import STATE
from banyan.ops.sampling import quantile, relaxed_token, support
from banyan.runner.batch import Batch
from banyan.runner.control_ops import Finish, RankReply
from banyan.runner.draft_trees import Compaction
from banyan.runner.forward import Forward
from banyan.runner.kvstore import KVStore
from banyan.runner.slots import SlotTable
from banyan.runner.speculative import Drafter, Tree

_OTHER = 0x5851_F42D_4C95_7F2D
"""Makes another stream of random numbers of a seed."""


class TargetHiddenStates:
    """The target model's hidden states in the step that ran last.

    Args:
        is_auxiliary: the drafter reads auxiliary hidden states instead of the last layer's.
    """

    def __init__(self, is_auxiliary: bool = False) -> None:
        self._is_auxiliary = is_auxiliary
        self._forward: Forward | None = None
        self._offsets: dict[int, int] = {}
        self._paths: dict[int, list[int]] = {}

    def enter(self, batch: Batch, forward: Forward) -> None:
        self._forward = forward
        slots, offsets = batch.slots.tolist(), batch.offsets.tolist()
        self._offsets = dict(zip(slots, offsets, strict=False))
        self._paths = {}

    def enter_path(self, slot: int, path: list[int]) -> None:
        """The accepted tokens of a draft tree, in order."""
        self._paths[slot] = path

    def hidden(self, slots: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Hidden states of the first accepted tokens of some rows; [sum of counts, width]."""
        assert self._forward is not None, "no step has run"
        firsts = [self._offsets[slot] for slot in slots]
        parts = [np.arange(at, at + count) for at, count in zip(firsts, counts, strict=True)]
        for i, slot in enumerate(slots):
            if slot in self._paths:
                parts[i] = firsts[i] + np.array(self._paths[slot][: counts[i]], np.int64)
        read = self._forward.aux_hidden if self._is_auxiliary else self._forward.hidden
        return read(np.concatenate(parts))


class PageEndStates:
    """Hidden states of the last token of each page, kept in the page itself.

    A request that starts after a cached prefix needs the state of the token before.

    Args:
        pages: of the draft layers; layer, name: the tensor that holds the states.
        width: numbers per token.
    """

    def __init__(self, table: SlotTable, pages: KVStore, layer: int, name: str, width: int) -> None:
        group = pages.group_of(layer)
        self._tables = table.pages[group]
        self._kept = pages.tensors(layer)[name].flatten(1)  # [num_pages, at least width]
        self._width = width
        self.page_size = pages.groups[group].page_size
        assert self._kept.shape[1] >= width

    def keep(self, slots: Sequence[int], positions: Sequence[int], states: Tensor) -> None:
        """Store states of tokens that are the last of their pages; states: [n, width]."""
        if slots:
            self._kept[self._at(slots, positions), : self._width] = states.to(self._kept.dtype)

    def of(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Stored states, [n, width]."""
        return self._kept[self._at(slots, positions), : self._width]

    def _at(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        columns = torch.tensor(positions) // self.page_size
        return self._tables[torch.tensor(slots), columns].long()


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many sampled tokens of a chain count: the accepted drafts and one more.

    drafts: [n]; sampled: [n + 1], the token after the row's last known one and after each draft.
    """
    for i, draft in enumerate(drafts):
        if sampled[i] != draft:
            return i + 1
    return len(drafts) + 1


def accepted_places(
    drafts: Sequence[int], parents: Sequence[int], sampled: Sequence[int]
) -> list[int]:
    """Indices of the accepted tokens among the sampled ones; parents: of a draft tree, or empty."""
    if parents:
        return accepted_path(drafts, parents, sampled)
    return list(range(count_accepted(drafts, sampled)))


@dataclass
class Verified:
    """The result of a step's verification, and the next drafts.

    Attributes:
        accepted: [outputs] bool: the sampled token is part of the answer.
        cut: index in the plan -> how many of the row's last positions were rejected.
        places: [outputs]: for draft trees, the output whose token takes this one's place.
        drafts: int32 ids per row of the plan, for the next row of its slot to verify.
        parents: as StepResult.parents.
        seconds: time that drafting took.
    """

    accepted: np.ndarray
    cut: dict[int, int]
    places: np.ndarray
    drafts: list[bytes] = field(default_factory=list[bytes])
    parents: list[bytes] = field(default_factory=list[bytes])
    seconds: float = 0.0


class Drafting:
    """Connects the slot table and a drafter.

    Args:
        target_hidden: the target's hidden states, which the drafter may read.
        store: its states are rolled back when drafts are rejected.
        compaction: moves accepted tree tokens to their positions; None = drafts are chains.
        branching: longest path of a draft tree, including the newest token; 0 = chains.
        thresholds: `accept_single` and `accept_total` of RunnerConfig.
    """

    def __init__(
        self,
        drafter: Drafter,
        table: SlotTable,
        target_hidden: TargetHiddenStates,
        store: KVStore | None = None,
        compaction: Compaction | None = None,
        branching: int = 0,
        thresholds: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self._thresholds = thresholds
        self._drafter = drafter
        self._table = table
        self._target_hidden = target_hidden
        self._store = store if store is not None and store.rollback_checkpoints else None
        self._compaction = compaction
        self._branching = branching
        self._known_slots: set[int] = set()

    def enter(self, plan: StepPlan) -> None:
        """Pass on leaves and joins, after the slot table has taken them."""
        for slot in plan.leaves:
            if slot in self._known_slots:
                self._known_slots.remove(slot)
                self._drafter.leave(slot)
        for join in plan.joins:
            # Places of spans have no tokens, and so nothing to draft from.
            if self._table.holds(join.slot) and not join.spans:
                self._known_slots.add(join.slot)
                self._drafter.join(join.slot, list(array("i", join.tokens)), join.namespace)

    def give(self, row: Row) -> None:
        """Pass on the tokens that a row brings."""
        if row.slot in self._known_slots:
            self._drafter.extend(row.slot, row.start, list(array("i", row.given)))

    def prepare_flush(self, order: ControlOp) -> Finish:
        """Forget the tokens of all requests; none runs."""

        def flush() -> RankReply:
            self._drafter.flush()
            return RankReply("Cache flushed.")

        return flush

    @property
    def is_relaxed(self) -> bool:
        """Whether drafts are accepted that were not sampled."""
        return self._thresholds != (1.0, 1.0)

    def relaxed(self, batch: Batch, tokens: Tensor, edited: Tensor) -> Tensor:
        """The sampled tokens, with drafts in the places where the thresholds accept them.

        tokens: [outputs] int64; edited: [outputs, vocab], the logits that they were chosen from.
        """
        found = tokens.cpu().numpy().copy()  # sync: drafts are verified on the host
        end, sampling = 0, batch.sampling.tolist()
        while end < len(found):
            at, first = sampling[end], end
            row = batch.rows[at]
            end += row.drafts + 1
            params = self._table.params[row.slot]
            if params["greedy"]:
                continue
            guessed = self._table.drafts.get(row.slot, [])[: row.drafts]
            is_tree = at in batch.branches
            parents = self._table.parents.get(row.slot, []) if is_tree else range(-1, row.drafts)
            filters = [params[name].item() for name in ("temperature", "top_k", "top_p", "min_p")]
            children: dict[int, list[int]] = {}
            for parent, draft in zip(parents, guessed, strict=False):
                children.setdefault(first + parent + 1, []).append(draft)
            for place, drafts in children.items():
                logits = edited[place].float().cpu().numpy()
                if int(found[place]) in drafts or not np.isfinite(logits.max()):
                    continue
                weight = support(logits, *filters)
                # Another number than the one that the token was drawn with.
                at_random = quantile(int(params["seed"]) ^ _OTHER, int(batch.to_positions[place]))
                for draft in drafts:
                    token = relaxed_token(
                        int(found[place]), draft, weight, at_random, *self._thresholds
                    )
                    if token == draft:
                        found[place] = draft
                        break
        return torch.from_numpy(found).to(tokens.device)

    def verify(self, batch: Batch, sampled: Tensor | None) -> Verified:
        """Enter the accepted tokens into the slot table and pass them to the drafter.

        sampled: [outputs] int64 on the host, because the next row begins after the accepted
            tokens; None = no row samples.
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
            if not row.drafts:  # most rows, if drafting does not pay off
                self._accept(row.slot, tokens[first:end])
                continue
            guessed = self._table.drafts.get(row.slot, [])[: row.drafts]
            parents = self._table.parents.get(row.slot, []) if at in batch.branches else []
            path = accepted_places(guessed, parents[: row.drafts], tokens[first:end])
            count = len(path)
            verified.accepted[first:end] = False
            verified.accepted[np.add(path, first)] = True
            verified.places[first : first + count] = np.add(path, first)
            verified.cut[int(batch.indices[at])] = end - first - count
            known = self._table.known[row.slot]
            accepted = [tokens[first + place] for place in path]
            if parents:
                self._accept_path(row.slot, known, path, accepted, moved)
            self._accept(row.slot, accepted)
        self._compact(moved)
        self._roll_back(batch, verified)
        return verified

    def draft(self, batch: Batch, verified: Verified, num_rows: int) -> None:
        """Ask the drafter for the next drafts. num_rows: of the plan."""
        began = time.perf_counter()
        verified.drafts, verified.parents = self._draft(batch, num_rows)
        verified.seconds = time.perf_counter() - began

    def _accept(self, slot: int, tokens: list[int]) -> None:
        """Append tokens to a slot."""
        known = self._table.known[slot]
        self._table.known[slot] = known + len(tokens)
        if slot in self._known_slots:
            self._drafter.extend(slot, known, tokens)

    def _accept_path(
        self,
        slot: int,
        known: int,
        path: list[int],
        accepted: list[int],
        moved: list[tuple[int, int, list[int]]],
    ) -> None:
        """Write the accepted tokens of a tree: siblings were sampled to the same positions."""
        tokens = torch.tensor(accepted, dtype=torch.int32)
        self._table.tokens[slot, known : known + len(accepted)] = tokens
        self._target_hidden.enter_path(slot, path)
        if path[-1] != len(path) - 1:
            moved.append((slot, known - 1, path))

    def _roll_back(self, batch: Batch, verified: Verified) -> None:
        """Restore states as they were after the last accepted token."""
        store, pages, checkpoints = self._store, list[int](), list[int]()
        if store is None:
            return
        group = next(at for at, layout in enumerate(store.groups) if layout.kind == STATE)
        for at, (row, (before, drafts)) in enumerate(
            zip(batch.rows, batch.rollback_checkpoints.tolist(), strict=True)
        ):
            if cut := verified.cut.get(int(batch.indices[at]), 0):
                pages.append(int(self._table.pages[group][row.slot, 0]))
                checkpoints.append(store.first_rollback_checkpoint + before + drafts - cut)
        if pages:
            store.roll_back(pages, checkpoints)

    def _compact(self, moved: Sequence[tuple[int, int, list[int]]]) -> None:
        if not moved:
            return
        assert self._compaction is not None, "this runner was opened for chains"
        slots: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        for slot, base, path in moved:
            for place, source in enumerate(path):
                if place != source:
                    slots.append(slot)
                    sources.append(base + source)
                    targets.append(base + place)
        self._compaction.move(slots, sources, targets)

    def _draft(self, batch: Batch, num_rows: int) -> tuple[list[bytes], list[bytes]]:
        drafts_of, parents = [b""] * num_rows, [b""] * num_rows
        mine = [at for at, row in enumerate(batch.rows) if row.slot in self._known_slots]
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
            drafts_of[index] = array("i", drafts).tobytes()
            if not is_chain(follows):
                assert tree.depth < self._branching, "this runner was opened for shorter branches"
                self._table.parents[row.slot] = follows
                parents[index] = array("i", follows).tobytes()
        return drafts_of, parents if any(parents) else []
