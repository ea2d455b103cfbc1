"""DraftRunner: runs a draft model next to the runner's own model.

The draft model's layers follow the target model's layers in the same pages, so one lease, one radix
tree and one store hold both. Its steps are recorded like the target's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from banyan.layers.build import Build
from banyan.messages.plan import SAMPLE, Row
from banyan.model_config.model_config import FULL
from banyan.models.base import Model
from banyan.models.dflash import DFlashLM
from banyan.models.mtp import END, FIRST, DraftLM
from banyan.ops.api import Ops
from banyan.platform.base import Platform
from banyan.runner.attention import BACKENDS, PagedAttentionBackend, WriteOnlyBackend
from banyan.runner.batch import Batch
from banyan.runner.choose_forward import open_forward
from banyan.runner.forward import Forward
from banyan.runner.kvstore import KVStore
from banyan.runner.runner_config import RunnerConfig
from banyan.runner.sampler import Sampler
from banyan.runner.slots import SlotTable
from banyan.runner.speculative.drafting import PageEndStates, TargetHiddenStates


@dataclass(frozen=True)
class DraftModel:
    """One rank's part of a draft model, and what it was built from.

    Attributes:
        mtp: the same model, if it reads tokens together with the target's hidden states (MTP,
            EAGLE); else None.
        blocks: the same model, if it reads hidden states alone and drafts blocks (DFLASH); else
            None.
    """

    model: Model
    build: Build
    mtp: DraftLM | None = None
    blocks: DFlashLM | None = None

    @property
    def reads(self) -> DraftLM | DFlashLM | None:
        """The model, if it reads the target's hidden states."""
        return self.mtp or self.blocks


@dataclass
class DraftRunner:
    """What a drafter with a draft model works with. Only `reopen` changes it.

    Attributes:
        table: tokens, parameters and pages of the slots. The drafter may write tokens after the
            known ones.
        opened: the draft model. Its pages have the numbers of the target's. None = released.
        open: opens the draft model.
        sampler: samples from the draft model's logits as the target does.
        ops: that the draft model was built from.
        vocab_size: of its logits.
        max_tokens: tokens of the largest recorded step; 0 = no limit.
        max_outputs: outputs of such a step; 0 = no limit.
        may_lag: its pages stay with a request while that runs, so it may read tokens later.
        target_hidden: the target's hidden states of the last step.
        fetch: begins to copy tensors to the host; returns a function that waits for them.
        page_ends: hidden state kept for the last token of each page; None = the draft model reads
            tokens alone.
        take_in: turns the target's hidden states into the draft model's input.
        reader: writes keys and values made from these (DFLASH); None = `forward` reads them
            together with tokens.
        mask_token: id in place of a token that a block predicts.
    """

    table: SlotTable
    opened: Forward | None
    open: Callable[[], Forward]
    sampler: Sampler
    ops: Ops
    vocab_size: int
    max_tokens: int
    max_outputs: int
    may_lag: bool
    target_hidden: TargetHiddenStates
    fetch: Callable[[Sequence[Tensor]], Callable[[], list[Tensor]]]
    page_ends: PageEndStates | None = None
    take_in: Callable[[Tensor], Tensor] | None = None
    reader: Forward | None = None
    mask_token: int = 0

    def close(self) -> None:
        """Free the graphs; nothing can run until `reopen`."""
        self.opened = None

    def reopen(self) -> None:
        """Capture graphs again, once the weights are there; nothing to do while it is open."""
        if self.opened is None:
            self.opened = self.open()

    @property
    def forward(self) -> Forward:
        """How steps run through the draft model."""
        assert self.opened is not None, "the draft model is released"
        return self.opened

    def run(self, rows: Sequence[Row], carried: Tensor | None = None) -> Batch:
        """Run rows through the draft model, and sample as the target does.

        carried: [tokens, width], for draft models that read more than tokens.
        """
        batch = Batch.of(list(enumerate(rows)))
        if carried is not None:
            batch = replace(batch, carried=carried)
        self.forward.run(batch)
        self.sample(batch)
        return batch

    def sample(self, batch: Batch) -> None:
        """Sample the outputs of a batch that has run, unless the forward itself has done so."""
        forward = self.forward
        if batch.wanted & SAMPLE and forward.next_tokens() is None:
            logits = forward.next_logits(batch)
            slots, positions = batch.to_slots, batch.to_positions
            self.sampler.sample(logits, slots, positions, {}, forward.targets(batch))


def in_steps(rows: Sequence[Row], most: int) -> Iterator[list[Row]]:
    """Group rows into steps of at most `most` tokens (0 = any). A longer row is its own step."""
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


def open_draft_runner(
    table: SlotTable,
    store: KVStore,
    config: RunnerConfig,
    platform: Platform,
    draft: DraftModel | None,
    target_hidden: TargetHiddenStates,
) -> DraftRunner:
    """Open a draft model whose layers are the last ones of `store`."""
    assert draft is not None, "this drafter needs a model, and none was loaded"
    model, build = draft.model, draft.build
    pages = store.of_layers_from(store.num_layers - len(model.caches))
    mtp, blocks, page_ends = draft.mtp, draft.blocks, None
    attention = BACKENDS.load(config.attention or "paged")(build.ops, pages)
    if mtp is not None:
        attention = PagedAttentionBackend(build.ops, pages, first=FIRST)
        page_ends = PageEndStates(table, pages, len(model.caches) - 1, END, mtp.width)
    # A row that sampled is read together with its new token: one token more for each row.
    most = config.max_tokens and config.max_tokens + config.max_slots
    width = 0 if mtp is None else mtp.width
    draft_room = config.draft_room if config.branching or blocks is not None else 0
    mine = replace(config, max_tokens=most, draft_room=draft_room, verified=0, carried=width)
    reader = None
    if blocks is not None:
        with platform.stream():
            states = replace(mine, carried=blocks.width, branching=0)
            writing = WriteOnlyBackend(build.ops, pages)
            reader = open_forward(
                blocks.state_writer, table, pages, build, states, writing, platform
            )
        mine = replace(mine, branching=config.verified)

    def open_draft() -> Forward:
        with platform.stream():
            return open_forward(model, table, pages, build, mine, attention, platform)

    return DraftRunner(
        table=table,
        opened=open_draft(),
        open=open_draft,
        sampler=Sampler(table, model.model_config.vocab_size, build.ops),
        ops=build.ops,
        vocab_size=model.model_config.vocab_size,
        max_tokens=most,
        max_outputs=most and config.max_slots + draft_room,
        may_lag=all(cache.kind == FULL for cache in model.caches),
        target_hidden=target_hidden,
        fetch=platform.fetch,
        page_ends=page_ends,
        take_in=None if draft.reads is None else draft.reads.project_states,
        reader=reader,
        mask_token=0 if blocks is None else blocks.facts.mask,
    )
