"""STANDALONE: a small model with the same vocabulary drafts.

Its keys and values are stored next to the target's in the request's pages. It reads each chunk of a
prompt in the same step as the target, and sampled tokens together with the first draft after them.
Drafts are sampled like the target's tokens: with the request's parameters and the random number of
the position, so two models that agree on a distribution agree on the token.
"""

from collections.abc import Callable, Sequence

from banyan.config.schema import SpeculativeConfig
from banyan.messages.plan import SAMPLE, Row
from banyan.runner.speculative import Guess, common_beginning
from banyan.runner.speculative.draft_runner import DraftRunner, in_steps
from banyan.runner.speculative.tree_growth import Grower, open_grower


class ModelDrafter:
    """Satisfies `Drafter`.

    Args:
        grower: grows draft trees; None = drafts are chains.
    """

    def __init__(self, draft_runner: DraftRunner, grower: Grower | None = None) -> None:
        self._draft = draft_runner
        self._grower = grower
        self._table = draft_runner.table
        self._read: dict[int, int] = {}
        """Slot -> positions whose keys and values the draft model has written; set by the slot's
        first row, whose pages are complete up to its start."""
        self._drafted: dict[int, list[int]] = {}
        """Slot -> drafts after its known tokens that the draft model has read as well."""

    def join(self, slot: int, tokens: list[int], namespace: bytes) -> None:
        self.leave(slot)

    def leave(self, slot: int) -> None:
        self._read.pop(slot, None)
        self._drafted.pop(slot, None)

    def extend(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Accepted drafts need not be read again."""
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
            return self._grower.grow_after(self._grower.read(due, ()), rows, counts)
        for some in in_steps(due, self._draft.max_tokens):
            self._draft.run(some)
        for done in range(1, max(counts, default=0)):
            again = [
                Row(row.slot, known[row.slot] + done - 1, 1, want=SAMPLE)
                for row, count in zip(rows, counts, strict=True)
                if count > done
            ]
            self._draft.run(again)
        drafts = [
            self._table.tokens[row.slot, known[row.slot] : known[row.slot] + count]
            for row, count in zip(rows, counts, strict=True)
        ]
        # sync: the scheduler needs them
        found = [each.tolist() for each in self._draft.fetch(drafts)()]
        for row, each in zip(rows, found, strict=True):
            if len(each) > 1:
                self._drafted[row.slot] = each[:-1]
        return found

    def flush(self) -> None:
        """Everything is in the pages, which the engine owns."""

    def _due(self, rows: Sequence[Row], counts: Sequence[int]) -> list[Row]:
        """Tokens that the draft model has not read, with a first draft for rows that want drafts.
        Other decoding rows may wait until there are more tokens to read."""
        due: list[Row] = []
        for row, count in zip(rows, counts, strict=True):
            start = self._read.setdefault(row.slot, row.start)
            is_prompt = row.count - row.drafts > 1 or not row.want & SAMPLE
            if not (count or is_prompt or not self._draft.may_lag):
                continue
            # A sampled token is read together with the first draft after it.
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
