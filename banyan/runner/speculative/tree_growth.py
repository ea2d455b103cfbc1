"""Draft trees grown by a draft model (EAGLE-2, arXiv 2406.16858).

For each of the likeliest tokens of a level the draft model predicts the likeliest next tokens. The
drafts are the nodes with the highest probability of their whole path.

The draft model writes a node's keys and values to any free place after the known tokens; a node
attends along its path. Only ancestors of nodes that are read next must be kept, and they are all
among the best drafts so far: so a tree needs no more places than a chain of as many drafts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from banyan.base.ids import SlotId
from banyan.config.schema import SpeculativeConfig
from banyan.messages.plan import SAMPLE, Row
from banyan.runner.batch import Batch
from banyan.runner.draft_trees import Branches
from banyan.runner.speculative import Guess, Tree
from banyan.runner.speculative.draft_runner import DraftRunner, in_steps


@dataclass(frozen=True)
class Ways:
    """The likeliest next tokens after each token that a pass has read for a slot.

    Attributes:
        tokens: [n, ways] ids, likeliest first; the lower id first among equals.
        logprobs: [n, ways] of these.
        made: [n, width], the draft model's hidden states of the tokens read.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    made: Tensor


@dataclass(eq=False)
class _Node:
    """
    Attributes:
        score: log-probability of the path up to and including this token, by the draft model.
        above: its parent; None for the newest token.
        parent_read: index of the parent among the tokens that were read last.
        place: distance from the newest token to where it is stored; 0 = it has not been read.
    """

    token: int = 0
    score: float = 0.0
    above: "_Node | None" = None
    parent_read: int = 0
    place: int = 0

    @property
    def path(self) -> list["_Node"]:
        """From the newest token to this one."""
        return [*(self.above.path if self.above else ()), self]


class Growing:
    """The tree of one slot, a level at a time.

    Args:
        count: drafts in it.
        steps: most levels.
        breadth: nodes of a level that are expanded.
    """

    def __init__(self, count: int, steps: int, breadth: int) -> None:
        self._count, self._steps, self._breadth = count, steps, breadth
        self._best: list[_Node] = []
        """The likeliest nodes, best first; among equals the one found first."""
        self.front = [_Node()]
        """Nodes that are read next; at first the root, which has been read."""

    def take(self, ways: Ways) -> None:
        """Add the next tokens after each of `front`."""
        self._steps -= 1
        scores = np.array([[node.score] for node in self.front]) + np.minimum(ways.logprobs, 0.0)
        flat = np.where(np.isfinite(scores), scores, -np.inf).ravel()
        width = scores.shape[1]
        level: list[_Node] = []
        for at in np.argsort(-flat, kind="stable")[: max(self._count, self._breadth)].tolist():
            if flat[at] == -np.inf:
                break
            parent, which = divmod(at, width)
            token = int(ways.tokens[parent, which])
            level.append(_Node(token, float(flat[at]), self.front[parent], parent))
        found = sorted(self._best + level, key=lambda node: -node.score)
        self._best = found[: self._count]
        # Children of the worst kept node score lower, so they cannot replace it.
        good = set(map(id, self._best[:-1] if len(self._best) == self._count else self._best))
        ahead = [node for node in level[: self._breadth] if id(node) in good]
        self.front = ahead if self._steps else []
        self._find_places()

    def _find_places(self) -> None:
        needed = {node.place for each in self.front for node in each.path if node.place}
        free = (place for place in range(1, self._count) if place not in needed)
        for node in self.front:
            node.place = next(free)

    @property
    def paths(self) -> list[list[int]]:
        """Paths of `front`, as `Branches.paths`."""
        return [[node.place for node in each.path] for each in self.front]

    @property
    def tree(self) -> Tree:
        where = {id(node): at for at, node in enumerate(self._best)}
        above = [where.get(id(node.above), -1) for node in self._best]
        return Tree([node.token for node in self._best], above)


class Grower:
    """
    Args:
        breadth: children of a node, and nodes of a level that are expanded.
        steps: most levels of a tree.
    """

    def __init__(self, draft_runner: DraftRunner, breadth: int, steps: int) -> None:
        self._draft = draft_runner
        self._breadth = min(breadth, draft_runner.vocab_size)
        self._steps = steps
        self._carries = draft_runner.take_in is not None

    def grow_after(
        self, roots: Mapping[SlotId, Ways], rows: Sequence[Row], counts: Sequence[int]
    ) -> list[Guess]:
        """As `Drafter.propose`. roots: next tokens after each slot's newest token.

        Overwrites what the table holds after the known tokens.
        """
        asked = {row.slot: count for row, count in zip(rows, counts, strict=True) if count}
        trees = {slot: Growing(its, self._steps, self._breadth) for slot, its in asked.items()}
        self._grow({slot: roots[slot] for slot in asked}, trees)
        return [trees[row.slot].tree if row.slot in trees else [] for row in rows]

    def _grow(self, ways: Mapping[SlotId, Ways], trees: Mapping[SlotId, Growing]) -> None:
        while ways:
            rows: list[Row] = []
            branches: dict[SlotId, Branches] = {}
            carried: list[Tensor] = []
            for slot, its in ways.items():
                tree = trees[slot]
                tree.take(its)
                if tree.front:
                    branches[slot] = Branches(self._draft.table.known[slot] - 1, tree.paths)
                    rows.append(row_of(slot, branches[slot]))
                    if self._carries:
                        carried.append(its.made[[node.parent_read for node in tree.front]])
            self._enter({slot: trees[slot] for slot in branches}, branches)
            ways = self.read(rows, carried, branches)

    def read(
        self,
        rows: Sequence[Row],
        carried: Sequence[Tensor],
        branches: Mapping[SlotId, Branches] | None = None,
    ) -> dict[SlotId, Ways]:
        """Run rows through the draft model; returns the next tokens of rows that sample, by slot.

        carried: of each row [tokens, width], extra inputs of the model; empty = it has none.
        branches: by slot.
        """
        found: dict[SlotId, Ways] = {}
        draft_runner, at = self._draft, 0
        most = draft_runner.max_outputs if branches else draft_runner.max_tokens
        for some in in_steps(rows, most):
            mine = {i: branches[row.slot] for i, row in enumerate(some)} if branches else None
            batch = Batch.of(list(enumerate(some)), mine)
            if carried:
                batch = replace(batch, carried=torch.cat(list(carried[at : at + len(some)])))
            at += len(some)
            draft_runner.forward.run(batch)
            if batch.wanted & SAMPLE:
                found |= self._look(batch)
        return found

    def _look(self, batch: Batch) -> Iterator[tuple[SlotId, Ways]]:
        """Next tokens of each slot of a batch that has run."""
        draft_runner, count = self._draft, len(batch.last)
        logits = draft_runner.forward.next_logits(batch)
        each = torch.arange(count, device=logits.device)
        plain = torch.ones(count, dtype=torch.float64, device=logits.device)
        sampled, picked = torch.zeros_like(each), each.new_empty(count, 0)  # not needed here
        _, tokens, logprobs, _ = draft_runner.ops.logprobs(
            logits, each, plain, sampled, self._breadth, picked
        )
        made = draft_runner.forward.hidden(batch.last)
        # sync: the next rows depend on them
        tokens, logprobs = draft_runner.fetch([tokens, logprobs])()
        edges = np.flatnonzero(np.diff(batch.to_slots, prepend=-1, append=-1)).tolist()
        for first, end in zip(edges[:-1], edges[1:], strict=True):
            numbers = (tokens[first:end].numpy(), logprobs[first:end].numpy().astype(np.float64))
            yield SlotId(int(batch.to_slots[first])), Ways(*numbers, made[first:end])

    def _enter(self, trees: Mapping[SlotId, Growing], branches: Mapping[SlotId, Branches]) -> None:
        """Write the tokens that are read next to their places."""
        slots = [slot for slot, tree in trees.items() for _ in tree.front]
        places = [place for slot in trees for place in branches[slot].places]
        tokens = [node.token for tree in trees.values() for node in tree.front]
        if slots:
            device = self._draft.table.tokens.device
            entries = torch.tensor([slots, places, tokens], device=device)
            self._draft.table.enter(*entries)


def open_grower(speculative: SpeculativeConfig, draft_runner: DraftRunner) -> Grower | None:
    """None = drafts are chains."""
    if speculative.eagle_topk <= 1:
        return None
    return Grower(draft_runner, speculative.eagle_topk, speculative.num_steps)


def row_of(slot: SlotId, branches: Branches) -> Row:
    """A row that samples after each of its tokens; it ends after all places that they read."""
    count = len(branches.paths)
    end = branches.base + max(map(max, branches.paths)) + 1
    return Row(slot, end - count, count, count - 1, want=SAMPLE)
