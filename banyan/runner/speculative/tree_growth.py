"""Trees that a draft model grows (EAGLE-2, arXiv 2406.16858): behind each of the likeliest tokens
of a level it is asked for the likeliest next ones, and those that are likeliest together with all
that leads to them are the drafts.

What it writes for a token lies behind the known ones, at any place that is free, and the token
reads along its path. Only what leads to one that is read next is needed, and all of that is among
the drafts that are best so far: so a tree takes no more places than a chain of as many drafts.
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
from banyan.runner.speculative.base import DraftRunner, Guess, Tree
from banyan.runner.speculative.draft_runner import in_steps


@dataclass(frozen=True)
class Ways:
    """How a slot goes on behind each of the tokens that a pass has read for it.

    Attributes:
        tokens: [n, ways] ids, the likeliest first, the lower one first among equals.
        logprobs: [n, ways] of these.
        made: [n, width], what the draft model made of the tokens that were read.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    made: Tensor


@dataclass(eq=False)
class _Node:
    """
    Attributes:
        score: log-probability of all tokens that lead here and of this one, by the draft model.
        above: what it follows; None of the newest token.
        behind: which of the tokens that were read last that is.
        place: where it lies, behind the newest token; 0 = it has not been read.
    """

    token: int = 0
    score: float = 0.0
    above: "_Node | None" = None
    behind: int = 0
    place: int = 0

    @property
    def path(self) -> list["_Node"]:
        """From the newest token to this one."""
        return [*(self.above.path if self.above else ()), self]


class Growing:
    """The tree of one slot, a level at a time.

    Args:
        count: drafts in it.
        steps: its levels at most.
        breadth: tokens of a level behind which it goes on.
    """

    def __init__(self, count: int, steps: int, breadth: int) -> None:
        self._count, self._steps, self._breadth = count, steps, breadth
        self._best: list[_Node] = []
        """The likeliest, best first; among equals the one that was found first."""
        self.front = [_Node()]
        """What is read next; in the beginning what has been read."""

    def take(self, ways: Ways) -> None:
        """What comes behind each of `front`."""
        self._steps -= 1
        scores = np.array([[node.score] for node in self.front]) + np.minimum(ways.logprobs, 0.0)
        flat = np.where(np.isfinite(scores), scores, -np.inf).ravel()
        width = scores.shape[1]
        level: list[_Node] = []
        for at in np.argsort(-flat, kind="stable")[: max(self._count, self._breadth)].tolist():
            if flat[at] == -np.inf:
                break
            behind, which = divmod(at, width)
            token = int(ways.tokens[behind, which])
            level.append(_Node(token, float(flat[at]), self.front[behind], behind))
        found = sorted(self._best + level, key=lambda node: -node.score)
        self._best = found[: self._count]
        # Behind the last of them nothing is likely enough to be one of them.
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
        """Of each of `front`, as `Branches.paths`."""
        return [[node.place for node in each.path] for each in self.front]

    @property
    def tree(self) -> Tree:
        where = {id(node): at for at, node in enumerate(self._best)}
        above = [where.get(id(node.above), -1) for node in self._best]
        return Tree([node.token for node in self._best], above)


class Grower:
    """
    Args:
        breadth: tokens that follow one, and tokens of a level behind which the trees go on.
        steps: levels of a tree at most.
    """

    def __init__(self, draft_runner: DraftRunner, breadth: int, steps: int) -> None:
        self._draft = draft_runner
        self._breadth = min(breadth, draft_runner.vocab_size)
        self._steps = steps
        self._carries = draft_runner.take_in is not None

    def grow_behind(
        self, roots: Mapping[SlotId, Ways], rows: Sequence[Row], counts: Sequence[int]
    ) -> list[Guess]:
        """As `Drafter.propose`; roots: by slot what follows its newest token.

        What the table holds behind the known tokens is lost.
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
                        carried.append(its.made[[node.behind for node in tree.front]])
            self._enter({slot: trees[slot] for slot in branches}, branches)
            ways = self.read(rows, carried, branches)

    def read(
        self,
        rows: Sequence[Row],
        carried: Sequence[Tensor],
        branches: Mapping[SlotId, Branches] | None = None,
    ) -> dict[SlotId, Ways]:
        """Rows through the draft model; returns by slot what follows where they sample.

        carried: of each row [tokens, width], what the model reads beside its tokens; empty where
            that is nothing. branches: by slot.
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
        """Of each slot of the batch, that has run."""
        draft_runner, count = self._draft, len(batch.last)
        logits = draft_runner.forward.next_logits(batch)
        each = torch.arange(count, device=logits.device)
        plain = torch.ones(count, dtype=torch.float64, device=logits.device)
        no_others = (torch.zeros_like(each), self._breadth, each.new_empty(count, 0))
        _, tokens, logprobs, _ = draft_runner.ops.logprobs(logits, each, plain, *no_others)
        made = draft_runner.forward.hidden(batch.last)
        # sync: what is read next depends on them
        tokens, logprobs = draft_runner.fetch([tokens, logprobs])()
        edges = np.flatnonzero(np.diff(batch.to_slots, prepend=-1, append=-1)).tolist()
        for first, end in zip(edges[:-1], edges[1:], strict=True):
            numbers = (tokens[first:end].numpy(), logprobs[first:end].numpy().astype(np.float64))
            yield SlotId(int(batch.to_slots[first])), Ways(*numbers, made[first:end])

    def _enter(self, trees: Mapping[SlotId, Growing], branches: Mapping[SlotId, Branches]) -> None:
        """The tokens that are read next go to where they are read."""
        slots = [slot for slot, tree in trees.items() for _ in tree.front]
        places = [place for slot in trees for place in branches[slot].places]
        tokens = [node.token for tree in trees.values() for node in tree.front]
        if slots:
            device = self._draft.table.tokens.device
            entries = torch.tensor([slots, places, tokens], device=device)
            self._draft.table.enter(*entries)


def open_grower(speculative: SpeculativeConfig, draft_runner: DraftRunner) -> Grower | None:
    """None where drafts are chains."""
    if speculative.eagle_topk <= 1:
        return None
    return Grower(draft_runner, speculative.eagle_topk, speculative.num_steps)


def row_of(slot: SlotId, branches: Branches) -> Row:
    """A row that samples behind each of its tokens and ends behind all that they read."""
    count = len(branches.paths)
    end = branches.base + max(map(max, branches.paths)) + 1
    return Row(slot, end - count, count, count - 1, want=SAMPLE)
