"""STANDALONE: drafts are what a small model of the same vocabulary goes on with.

Its keys and values lie in the pages of the request, beside the target's. In the step in which the
target reads a piece of a prompt the small model reads it too, and what the target has sampled is
read with the first token that is drafted behind it. A draft is drawn as the target draws: by the
request's parameters, and with the quantile of its position, so that two models that agree on a
distribution agree on the token.
"""

from collections.abc import Callable, Sequence

from banyan.config.schema import SpeculativeConfig
from banyan.messages.plan import SAMPLE, Row
from banyan.runner.speculative.base import DraftRunner, Guess, common_beginning
from banyan.runner.speculative.draft_runner import in_steps, run_pass
from banyan.runner.speculative.tree_growth import Grower, open_grower


class ModelDrafter:
    """Satisfies `speculative.base.Drafter`.

    Args:
        grower: of drafts that branch; None = they are chains.
    """

    def __init__(self, draft_runner: DraftRunner, grower: Grower | None = None) -> None:
        self._draft = draft_runner
        self._grower = grower
        self._table = draft_runner.table
        self._read: dict[int, int] = {}
        """Slot -> positions whose keys and values the draft model has written. None of a slot that
        has joined and not run: where its first row starts, its pages have been read before."""
        self._drafted: dict[int, list[int]] = {}
        """Slot -> drafts behind its known tokens that the draft model has read as well."""

    def join(self, slot: int, tokens: list[int], namespace: bytes) -> None:
        self.leave(slot)

    def leave(self, slot: int) -> None:
        self._read.pop(slot, None)
        self._drafted.pop(slot, None)

    def extend(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Drafts that have come true need not be read again."""
        read, drafted = self._read.get(slot), self._drafted.pop(slot, [])
        if read is None:
            return
        if read == first:
            read += common_beginning(drafted, tokens)
        self._read[slot] = min(read, first + len(tokens)) if read > first else read

    def propose(self, rows: Sequence[Row], counts: Sequence[int]) -> Sequence[Guess]:
        known = self._table.known
        due = self._due(rows, counts)
        if self._grower is not None:
            return self._grower.grow_behind(self._grower.read(due, ()), rows, counts)
        for some in in_steps(due, self._draft.max_tokens):
            run_pass(self._draft, some)
        for done in range(1, max(counts, default=0)):
            again = [
                Row(row.slot, known[row.slot] + done - 1, 1, want=SAMPLE)
                for row, count in zip(rows, counts, strict=True)
                if count > done
            ]
            run_pass(self._draft, again)
        drafts = [
            self._table.tokens[row.slot, known[row.slot] : known[row.slot] + count]
            for row, count in zip(rows, counts, strict=True)
        ]
        # sync: they are told to the scheduler
        found = [each.tolist() for each in self._draft.fetch(drafts)()]
        for row, each in zip(rows, found, strict=True):
            if len(each) > 1:
                self._drafted[row.slot] = each[:-1]
        return found

    def flush(self) -> None:
        """Nothing is remembered beside the pages, which are the engine's."""

    def _due(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Row]:
        """What the slots hold and the draft model has not read, with a first draft where one is
        asked for. Of others that go token by token it may wait until there are more."""
        due: list[Row] = []
        for row, count in zip(rows, counts, strict=True):
            start = self._read.setdefault(row.slot, row.start)
            is_prompt = row.count - row.drafts > 1 or not row.want & SAMPLE
            if not (count or is_prompt or not self._draft.may_lag):
                continue
            # What was sampled is read when something is drafted behind it.
            end = self._table.known[row.slot] if row.want & SAMPLE else row.start + row.count
            end -= not count and bool(row.want & SAMPLE)
            if end > start:
                due.append(Row(row.slot, start, end - start, want=SAMPLE if count else 0))
                self._read[row.slot] = end
        return due


def open_standalone(
    speculative: SpeculativeConfig, open_draft_runner: Callable[[], DraftRunner]
) -> ModelDrafter:
    draft_runner = open_draft_runner()
    return ModelDrafter(draft_runner, open_grower(speculative, draft_runner))
