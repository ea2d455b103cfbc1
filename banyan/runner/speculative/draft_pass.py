"""A pass of a draft model: rows through it, and what it draws behind them into the slot table."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from banyan.messages.plan import SAMPLE, Row
from banyan.runner.batch import Batch
from banyan.runner.speculative.base import Beside


def run_pass(beside: Beside, rows: Sequence[Row], carried: Tensor | None = None) -> Batch:
    """Draws as the target draws, for the rows that sample.

    carried: [tokens, width], where the draft model reads more than tokens.
    """
    forward, batch = beside.forward, Batch.of(list(enumerate(rows)))
    if carried is not None:
        batch = replace(batch, carried=carried)
    forward.run(batch)
    sample_pass(beside, batch)
    return batch


def sample_pass(beside: Beside, batch: Batch) -> None:
    """Draw where a batch samples that has run, unless its program has done so."""
    forward = beside.forward
    if batch.wanted & SAMPLE and forward.next_tokens() is None:
        logits = forward.next_logits(batch)
        slots, positions = batch.to_slots, batch.to_positions
        beside.sampler.sample(logits, slots, positions, {}, forward.targets(batch))


def in_steps(rows: Sequence[Row], most: int) -> Iterator[list[Row]]:
    """The rows by steps of at most `most` tokens, 0 = any; a longer row has one of its own."""
    some: list[Row] = []
    tokens = 0
    for row in rows:
        if some and most and tokens + row.count > most:
            yield some
            some, tokens = [], 0
        some.append(row)
        tokens += row.count
    if some:
        yield some
