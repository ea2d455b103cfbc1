"""A draft model beside the runner's own. Its layers lie behind the other's in the same pages, so
that one lease, one radix tree and one store hold both, and its steps are recorded like all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from banyan.layers.build import Build
from banyan.messages.plan import SAMPLE, Row
from banyan.model_config.model_config import FULL
from banyan.models.base import Model
from banyan.models.dflash import DFlashLM
from banyan.models.mtp import END, FIRST, DraftLM
from banyan.platform.base import Platform
from banyan.runner.attention import BACKENDS
from banyan.runner.attention.paged import PagedAttention, WriteOnlyAttention
from banyan.runner.batch import Batch
from banyan.runner.choose_forward import RunnerConfig, open_forward
from banyan.runner.kvstore import KVStore
from banyan.runner.sampling.sampler import Sampler
from banyan.runner.slots import SlotTable
from banyan.runner.speculative.base import DraftRunner
from banyan.runner.speculative.drafting import PageEndStates, TargetHiddenStates


def run_pass(
    draft_runner: DraftRunner, rows: Sequence[Row], carried: Tensor | None = None
) -> Batch:
    """Draws as the target draws, for the rows that sample.

    carried: [tokens, width], where the draft model reads more than tokens.
    """
    forward, batch = draft_runner.forward, Batch.of(list(enumerate(rows)))
    if carried is not None:
        batch = replace(batch, carried=carried)
    forward.run(batch)
    sample_pass(draft_runner, batch)
    return batch


def sample_pass(draft_runner: DraftRunner, batch: Batch) -> None:
    """Draw where a batch samples that has run, unless its program has done so."""
    forward = draft_runner.forward
    if batch.wanted & SAMPLE and forward.next_tokens() is None:
        logits = forward.next_logits(batch)
        slots, positions = batch.to_slots, batch.to_positions
        draft_runner.sampler.sample(logits, slots, positions, {}, forward.targets(batch))


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


@dataclass(frozen=True)
class DraftModel:
    """One rank's share of it, and what it was made from.

    Attributes:
        mtp: the same model if it reads tokens together with the target's hidden states; else None.
        blocks: the same model, where it reads these alone and drafts blocks behind them; else None.
    """

    model: Model
    build: Build
    mtp: DraftLM | None = None
    blocks: DFlashLM | None = None

    @property
    def reads(self) -> DraftLM | DFlashLM | None:
        """What reads the target's states, if anything does."""
        return self.mtp or self.blocks


def open_draft_runner(
    table: SlotTable,
    store: KVStore,
    sizes: RunnerConfig,
    platform: Platform,
    draft: DraftModel | None,
    target: TargetHiddenStates,
) -> DraftRunner:
    """Open a draft model whose layers are the last ones of `store`."""
    assert draft is not None, "this drafter needs a model, and none was loaded"
    model, ops = draft.model, draft.build.ops
    pages = store.of_layers_from(store.num_layers - len(model.caches))
    mtp, blocks, ends = draft.mtp, draft.blocks, None
    attention = BACKENDS.load(sizes.attention or "paged")(ops, pages)
    if mtp is not None:
        attention = PagedAttention(ops, pages, first=FIRST)
        ends = PageEndStates(table, pages, len(model.caches) - 1, END, mtp.width)
    # Rows that sampled are read with the token that they gave.
    most = sizes.max_tokens and sizes.max_tokens + sizes.max_slots
    width = 0 if mtp is None else mtp.width
    room = sizes.draft_room if sizes.branching or blocks is not None else 0
    mine = replace(sizes, max_tokens=most, draft_room=room, verified=0, carried=width)
    reader = None
    with platform.stream():
        if blocks is not None:
            states = replace(mine, carried=blocks.width, branching=0)
            writing = WriteOnlyAttention(ops, pages)
            what = (blocks.state_writer, table, pages, draft.build, states, writing, platform)
            reader = open_forward(*what)
            mine = replace(mine, branching=sizes.verified)
        forward = open_forward(model, table, pages, draft.build, mine, attention, platform)
    return DraftRunner(
        table,
        forward,
        Sampler(table, model.model_config.vocab_size, ops),
        ops,
        model.model_config.vocab_size,
        most,
        most and sizes.max_slots + room,
        may_lag=all(cache.kind == FULL for cache in model.caches),
        target=target,
        ends=ends,
        take_in=None if draft.reads is None else draft.reads.project_states,
        reader=reader,
        mask=0 if blocks is None else blocks.facts.mask,
        fetch=platform.fetch,
    )
