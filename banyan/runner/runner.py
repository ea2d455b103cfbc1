"""ModelRunner: executes step plans on tensors. Read it from top to bottom.

    launch(plan) = begin (enter the plan, run the forward pass) + end (sample, verify, read out)

The runner follows plans and decides nothing. A row that cannot run or sample fails alone; an
exception in the forward pass fails the whole step. All ranks run the same plan; rank 0 samples and
broadcasts the tokens.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from banyan.base.ids import PADDING_SLOT, StepId
from banyan.base.log import logger
from banyan.base.trace import Marks
from banyan.dp_attention.batch import DPAttentionStep
from banyan.kv_transfer.page_mover import PageMover
from banyan.layers.build import Build
from banyan.layers.cache_spec import numbered_through
from banyan.lora.pool import LoRAPool
from banyan.lora.slots import AdapterSlots
from banyan.messages.plan import (
    DEVICE,
    HIDDEN,
    PEER,
    POOL,
    SAMPLE,
    SCORE,
    STORE,
    CopyResult,
    PageCopy,
    PieceFailure,
    Row,
    StepPlan,
    StepResult,
)
from banyan.model_config.model_config import FULL, STATE, WINDOW
from banyan.models.base import Model
from banyan.moe.routing_record import returned_experts
from banyan.ops.api import OpTime
from banyan.ops.bind import BoundOps
from banyan.ops.host_memory import copy_to
from banyan.platform.base import Platform
from banyan.platform.cpu import CpuPlatform
from banyan.runner.attention import BACKENDS, AttentionBackend
from banyan.runner.batch import Batch, histories
from banyan.runner.choose_forward import open_forward
from banyan.runner.double_sparsity import DoubleSparsityBackend, HeavyTokens, PlainPages
from banyan.runner.draft_trees import Compaction, branches_of
from banyan.runner.features import Features, SpanTable, form_of
from banyan.runner.forward import Forward
from banyan.runner.kvstore import KVStore
from banyan.runner.logprobs import CHUNK_ELEMENTS, ScoredPositions, StepScores
from banyan.runner.multi_step import MultiStep
from banyan.runner.rank_pages import end_together
from banyan.runner.runner_config import Abilities, RunnerConfig
from banyan.runner.sampler import Processors, Sampled, Sampler
from banyan.runner.slots import RowError, SlotTable
from banyan.runner.speculative import Drafter
from banyan.runner.speculative.draft_runner import DraftModel, DraftRunner, open_draft_runner
from banyan.runner.speculative.drafting import Drafting, TargetHiddenStates, Verified
from banyan.runner.step_outputs import (
    BegunStep,
    LaunchedStep,
    Pooler,
    StepOutputs,
    build_result,
    failed_result,
    finish_after,
    read_hidden_states,
)

log = logger(__name__)

MaskOf = Callable[[int], bytes]
"""Waits for the grammar mask of a row, given its index in the plan."""


class ModelRunner:
    """One rank's executor of step plans.

    Args:
        build: kernels, ranks and device that the model was built from.
        platform: None = CPU.
        open_mover: opens the mover that copies pages beyond the device; None = they stay there.
        open_drafter: opens the drafter, given a function that opens its draft model; None = no
            speculative decoding.
        draft: the draft model; None = the drafter needs none.
        lora_pool: LoRA adapters that joins may name; None = there are none.
    """

    def __init__(
        self,
        model: Model,
        build: Build,
        config: RunnerConfig,
        platform: Platform | None = None,
        open_mover: Callable[[KVStore], PageMover | None] | None = None,
        open_drafter: Callable[[Callable[[], DraftRunner]], Drafter] | None = None,
        draft: DraftModel | None = None,
        lora_pool: LoRAPool | None = None,
    ) -> None:
        model_config, device = model.model_config, build.device
        self.platform = platform or CpuPlatform()
        self._build = build
        self._device = device
        self._ranks = build.groups.world
        self._model_config = model_config
        adapters = None
        if lora_pool is not None:
            adapters = AdapterSlots(config.max_slots + 1, lora_pool, build.groups)
        self._table = SlotTable(
            max_slots=config.max_slots,
            max_length=config.max_length,
            vocab_size=model_config.vocab_size,
            groups=config.groups,
            device=device,
            is_drafting=open_drafter is not None,
            adapters=adapters,
            multi_steps=config.multi_step > 1,
        )
        self._features: Features | None = None
        if model.takes_features:
            is_alone = self._ranks.size == 1
            stages = build.groups.stages
            self._features = Features(form_of(model), build.dtype, device, stages, is_alone)
            self._table.spans = SpanTable(config.max_slots + 1, device, self._features)
        # The draft model's layers follow the model's in the same pages, so one lease, one radix
        # tree and one store hold both.
        draft_caches = [] if draft is None else draft.model.caches
        traits = self.platform.traits
        can_roll_back = (traits.is_host or traits.rolls_back) and not config.branching
        self.store = KVStore(
            groups=config.groups,
            caches=numbered_through([model.caches, draft_caches]),
            device=device,
            is_shared=config.shares_pages,
            stream=self.platform.stream,
            rollback_checkpoints=config.draft_room
            if open_drafter is not None and can_roll_back
            else 0,
        )
        self.mover = None if open_mover is None else open_mover(self.store)
        reads = None if draft is None else draft.reads
        aux_layers = () if reads is None else reads.aux_layers
        # A drafter that reads the last hidden states needs them for every token.
        reads_all = config.reads_all or (reads is not None and not aux_layers)
        self._config = replace(config, aux_hidden_layers=aux_layers, reads_all=reads_all)
        self.device_thread = DeviceThread()
        self.wake_fd: int | None = None
        """Eventfd with which running steps wake the engine loop; None = they do not."""
        self.marks = Marks("runner")
        """Profiler spans of the launching thread."""
        self.on_ran: Callable[[], None] | None = None
        """Called after each step with rows, while a profile is recorded."""
        self._sampler = Sampler(self._table, model_config.vocab_size, build.ops)
        self._processors = Processors(self._table)
        self._target_hidden = TargetHiddenStates(bool(aux_layers))
        """Hidden states of the last step, for drafters that read them."""
        self._drafting: Drafting | None = None
        self._draft_runner: DraftRunner | None = None
        if open_drafter is not None:

            def open_draft() -> DraftRunner:
                self._draft_runner = open_draft_runner(
                    self._table, self.store, config, self.platform, draft, self._target_hidden
                )
                return self._draft_runner

            compaction = None
            if config.branching:
                layers = 1 + max((cache.layer for cache in model.caches), default=-1)
                compaction = Compaction(self._table, self.store, layers, build.ops)
            self._drafting = Drafting(
                open_drafter(open_draft),
                self._table,
                self._target_hidden,
                self.store,
                compaction,
                config.branching,
                (config.accept_single, config.accept_total),
            )
        self._score_chunk = max(1, CHUNK_ELEMENTS // model_config.vocab_size)
        self._dp_step: DPAttentionStep | None = None
        if build.groups.dp_batch is not None:
            # All replicas must use the same chunk, however each one runs the model.
            chunk = min(self._score_chunk, config.max_slots)
            self._dp_step = DPAttentionStep(build.groups.dp_batch, chunk)
        self._opened: Forward | None = None
        """None = the model, or the memory of its graphs, is released."""
        self._pooler: Pooler | None = None
        self.take_model(model)

    def take_model(self, model: Model, opens: bool = True) -> None:
        """Run `model`, which has the same model config, from the next step on.

        Args:
            opens: False = the pages are released; `take_model` must be called again.
        """
        self.platform.synchronize()
        self.model: Model | None = model
        if self._features is not None:
            self._features.towers = model.towers
        if not opens:
            return
        model_config = self._model_config
        attention = self._open_attention()
        with self.platform.stream():
            self._opened = open_forward(
                model=model,
                table=self._table,
                store=self.store,
                build=self._build,
                config=self._config,
                attention=attention,
                platform=self.platform,
            )
        if self._draft_runner is not None:
            self._draft_runner.reopen()
        self.platform.synchronize()
        self._pooler = None
        if model_config.pooling is not None:
            self._pooler = Pooler(model_config.pooling, model, self._table.adapters)

    def _open_attention(self) -> AttentionBackend:
        sparsity, build, model_config = self._config.sparsity, self._build, self._model_config
        if sparsity.is_enabled:
            plain = cast(BoundOps, build.ops).plain_pages("paged_attention")
            tokens = HeavyTokens(sparsity, model_config, build.device, cast(PlainPages, plain))
            return DoubleSparsityBackend(build.ops, self.store, tokens)
        default = "encoder" if model_config.is_encoder else "paged"
        return BACKENDS.load(self._config.attention or default)(build.ops, self.store)

    def drop_model(self, keeps_weights: bool = False, drops_draft: bool = False) -> None:
        """Free the model, or only the graphs that run it; no rows can run until `take_model`.

        Args:
            drops_draft: free the graphs that run the draft model as well.
        """
        self.platform.synchronize()
        if drops_draft and self._draft_runner is not None:
            self._draft_runner.close()
        self._opened = self._pooler = None
        if not keeps_weights:
            self.model = None

    @property
    def forward(self) -> Forward:
        """How steps run through the model."""
        assert self._opened is not None, "the model is released"
        return self._opened

    @property
    def abilities(self) -> Abilities:
        """What plans may ask of this runner."""
        return Abilities(
            groups=(FULL, WINDOW, STATE),
            copies=True,
            tiers=(DEVICE,) if self.mover is None else (DEVICE, STORE, PEER),
            drafts=self._drafting is not None,
            goes_back=self.store.rollback_checkpoints > 0,
            peers=self._dp_step is not None,
            adapters=self._table.adapters is not None,
            text=self._pooler is None,
            vectors=self._pooler is not None,
            hidden=True,
            features=self._features is not None,
            multi_steps=self.forward.is_recorded
            and self._pooler is None
            and self._drafting is None
            and self._ranks.size == 1,
        )

    @property
    def drafting(self) -> Drafting | None:
        """None = no speculative decoding."""
        return self._drafting

    # -- one step -----------------------------------------------------------------------------

    def launch(self, plan: StepPlan, mask_of: MaskOf | None = None) -> LaunchedStep:
        """Run a plan: leaves, joins, grants, copies before, rows, copies after. Never raises."""
        began = time.perf_counter()
        with self.device_thread.inference_mode(), self.platform.stream():
            copies = self.begin_copies(plan.copies)
            try:
                finish = self._execute(plan, mask_of)
            except Exception as error:
                log.exception("step=%d failed", plan.step)
                result = failed_result(plan, error)
                launch_s = time.perf_counter() - began
                return LaunchedStep(plan, copies, lambda: result, launch_s, is_broken=True)
        return LaunchedStep(plan, copies, finish, time.perf_counter() - began)

    def _execute(self, plan: StepPlan, mask_of: MaskOf | None) -> Callable[[], StepResult]:
        begun = self.begin(plan)
        finish = self.end(begun, mask_of)
        if self.on_ran is not None and plan.rows:
            self.on_ran()
        self.store.copy(plan.copies, "after")
        if self.store.is_shared:
            other_ranks = end_together(self.store, plan.copies, self._ranks)
            if other_ranks is not None:
                return finish_after(self.platform.fetch([other_ranks]), finish)
        return finish

    def begin_copies(self, copies: list[PageCopy]) -> CopyResult:
        """Give copies to and from a store to the mover; returns the result of the others, which are
        part of the step."""
        on_device = [copy.id for copy in copies if copy.is_on_device]
        if self.mover is None:
            return CopyResult(on_device, [copy.id for copy in copies if not copy.is_on_device])
        self.mover.start(copies)
        return CopyResult(on_device)

    def begin(self, plan: StepPlan, receive: Callable[[Batch], Tensor] | None = None) -> BegunStep:
        """Enter a plan and run its rows through this rank's layers.

        Args:
            receive: receives the previous pipeline stage's output for a batch, [tokens, hidden].
        """
        table, marks = self._table, self.marks
        marks.begin()
        table.leave(plan.leaves)
        table.join(plan.joins)
        table.grant(plan.grants)
        self.store.copy(plan.copies, "before")
        spoilt: list[PieceFailure] = []
        if self._features is not None and (plan.contents or plan.pieces or plan.forget):
            spoilt = self._features.enter(plan)
        if self._drafting is not None:
            self._drafting.enter(plan)
        batch, failed = self._build_batch(plan.rows, plan.steps > 1)
        if self._features is not None and self._features.has_faults:
            faults = zip(
                batch.indices.tolist(), map(self._table.spans.fault, batch.rows), strict=True
            )
            failed |= {index: fault for index, fault in faults if fault is not None}
        if self._dp_step is not None and (plan.rows or plan.replica_loads):
            self._dp_step.begin(plan.replica_loads)
        marks.end("enter", step=plan.step)
        # With DP attention a replica without rows still runs the other replicas' collectives.
        if not batch.rows and not plan.replica_loads:
            return BegunStep(plan, batch, failed, spoilt)
        if receive is not None:
            batch = replace(batch, carried=receive(batch))
        multi_step, watch = self._run(batch, plan), self._build.watch
        chosen = None if watch is None else watch.chosen
        return BegunStep(plan, batch, failed, spoilt, multi_step, chosen)

    def end(self, begun: BegunStep, mask_of: MaskOf | None) -> Callable[[], StepResult]:
        """Sample, verify drafts and read out other outputs; returns a function that waits for the
        result. With pipeline parallelism other plans may have begun since: `forward.select`."""
        outputs = self._outputs(begun, mask_of) if begun.has_run else StepOutputs()
        finish = partial(build_result, begun, outputs, outputs.fetch(self.platform))
        if not begun.batch.rows or self.forward.results_are_final:
            return finish
        # A recorded step has already ended, and the next one writes to the same memory.
        result = finish()
        self.marks.end("read out")
        return lambda: result

    # -- from other threads, during a plan of several steps ------------------------------------

    def interrupt(self, step: StepId) -> None:
        """End plans up to this one after their current step."""
        if (multi_steps := self.forward.multi_steps) is not None:
            multi_steps.interrupt(step)

    def tokens_so_far(self, step: StepId) -> dict[int, bytes] | None:
        """Tokens that the running plan `step` has sampled in completed steps: index in the plan ->
        int32 ids. None = that plan is not running."""
        multi_steps = self.forward.multi_steps
        return None if multi_steps is None else multi_steps.tokens_so_far(step)

    def wake_next_step(self) -> bool:
        """Wake the engine loop once when the rows of the next plan run; False = not possible."""
        recorder = self._build.ops.recorder
        if recorder is None or self.wake_fd is None:
            return False
        recorder.wake_next(self.wake_fd)
        return True

    # -- parts of `begin` ---------------------------------------------------------------------

    def _build_batch(self, rows: list[Row], in_multi_step: bool) -> tuple[Batch, dict[int, str]]:
        """The rows that can run, and why the others cannot. Equal on every rank."""
        good: list[tuple[int, Row]] = []
        failed: dict[int, str] = {}
        # With DP attention the other replicas expect exactly the agreed number of tokens, so
        # padding replaces failed rows and missing drafts.
        is_agreed, missing = self._dp_step is not None, 0
        for index, row in enumerate(rows):
            try:
                if row.want & POOL and self._pooler is None:
                    raise RowError("this model is not served for pooled vectors")
                exact = self._table.prepare(row, bool(row.want & SAMPLE))
            except RowError as error:
                failed[index] = str(error)
                if is_agreed:
                    good.append((index, Row(PADDING_SLOT, 0, row.count)))
            else:
                if in_multi_step:  # each of the steps runs one position
                    exact = msgspec.structs.replace(exact, count=1, drafts=0)
                good.append((index, exact))
                missing += row.count - exact.count if is_agreed else 0
                if row.given and self._drafting is not None:
                    self._drafting.give(row)
        while missing > 0:
            good.append((len(rows), Row(PADDING_SLOT, 0, min(missing, self._table.max_length))))
            missing -= self._table.max_length
        trees = self._table.parents
        return Batch.of(good, branches_of(good, trees) if trees else {}), failed

    def _run(self, batch: Batch, plan: StepPlan) -> MultiStep | None:
        """The forward pass. While a trace is recorded, its ops are timed too.

        returns: the steps before the last one, if the plan has several.
        """
        times: list[OpTime] = []
        trace = self.marks.trace
        self.forward.on_op_times = None if trace is None else times.extend
        multi_step = None
        if plan.steps > 1:
            steps = min(row.count for row in plan.rows)
            wake_fd = -1 if self.wake_fd is None else self.wake_fd
            multi_step = self.forward.multi_step(
                batch, steps, plan.step, plan.report_every, wake_fd
            )
        if multi_step is None:
            self.forward.run(batch)
        if self._build.watch is not None:
            self._build.watch.ran(batch.positions)
        at = self.marks.end("forward", rows=len(batch.rows), tokens=int(batch.offsets[-1]))
        for op in times:
            if trace is not None and at:
                trace.add("ops", op.name, at, op.seconds, bytes=op.bytes)
            at += op.seconds
        return multi_step

    # -- parts of `end` -----------------------------------------------------------------------

    def _outputs(self, begun: BegunStep, mask_of: MaskOf | None) -> StepOutputs:
        plan, batch, multi_step = begun.plan, begun.batch, begun.multi_step
        sampled, scores, verified = self._sample_and_score(plan, batch, mask_of)
        if multi_step is not None:
            self._table.grow(batch.to_slots, multi_step.steps - 1)
        if self._drafting is not None and verified is not None:
            self._drafting.draft(batch, verified, len(plan.rows))
        vectors = None if self._pooler is None else self._pooler.read(self.forward, batch)
        hidden: dict[int, Tensor] = {}
        if batch.wanted & HIDDEN:
            hidden = read_hidden_states(self.forward, batch)
        if begun.chosen is not None:
            watch = self._build.watch
            hidden |= returned_experts(watch, begun.chosen, batch, self._model_config)
        return StepOutputs(sampled, scores, vectors, hidden, verified, multi_step)

    def _sample_and_score(
        self, plan: StepPlan, batch: Batch, mask_of: MaskOf | None
    ) -> tuple[Sampled | None, StepScores | None, Verified | None]:
        """Sample, verify and score. Logits are computed only for the positions that need them.

        The order matters, because logits share one memory: first known (prompt) tokens are scored,
        then the outputs' logits are computed and sampled from, then the sampled tokens are scored.
        """
        scored, scores = None, None
        if batch.wanted & SCORE:
            scored = ScoredPositions.of(batch, self._table)
            scores = StepScores(
                scored, batch, self._table, self._device, self._build.ops, self._config.raw_logprobs
            )
        self._score_known(batch, scored, scores)
        samples = bool(batch.wanted & SAMPLE)
        if not samples and (self._dp_step is None or not self._dp_step.has_outputs):
            return None, scores, self._verify(batch, None)
        sampled, logits = None if self._is_relaxed else self.forward.next_tokens(), None
        if sampled is None:
            logits = self.forward.next_logits(batch)
            if not samples:  # the logits were computed for other replicas
                return None, scores, self._verify(batch, None) if batch.rows else None
            sampled = self._sample(plan, batch, logits, mask_of)
        if self._drafting is None:
            here = replace(sampled, edited=None)  # else the result would hold the step's logits
        else:
            here = sampled.fetched(self.platform)
        verified = self._verify(batch, here)
        if scored is None or scores is None:
            return here, None, verified
        entries = np.flatnonzero(scored.is_sampled)
        if len(entries) and not self._ranks.rank:
            rows = batch.outputs_at(scored.row[entries], scored.position[entries])
            if verified is not None:
                rows = verified.places[rows]
            chosen = copy_to(rows, self._device)
            assert logits is not None, "a step that scores does not sample by itself"
            if not self._config.raw_logprobs:
                logits = sampled.edited_logits(logits)
            scores.fill(entries, logits, rows, sampled.tokens[chosen])
        return here, scores, verified

    @property
    def _is_relaxed(self) -> bool:
        return self._drafting is not None and self._drafting.is_relaxed

    def _verify(self, batch: Batch, sampled: Sampled | None) -> Verified | None:
        """Accept or reject drafts, and count the accepted tokens as part of their slots."""
        if self._drafting is not None:
            self._target_hidden.enter(batch, self.forward)
            return self._drafting.verify(batch, None if sampled is None else sampled.tokens)
        if sampled is not None:
            self._table.grow(batch.to_slots)
        return None

    def _score_known(
        self, batch: Batch, scored: ScoredPositions | None, scores: StepScores | None
    ) -> None:
        """Score tokens that were known before the step, in chunks of bounded memory."""
        known = np.zeros(0, np.int64) if scored is None else np.flatnonzero(~scored.is_sampled)
        for part in self._score_chunks(len(known)):
            entries = known[part]
            if scored is None or scores is None or not len(entries):
                self.forward.logits(entries)  # joins the other replicas' collectives
                continue
            row, position = scored.row[entries], scored.position[entries]
            before = batch.offsets[row] + position - 1 - batch.starts[row]
            logits = self.forward.logits(before)
            slots, positions = copy_to(np.stack([batch.slots[row], position]), self._device)
            tokens = self._table.tokens[slots, positions].long()
            scores.fill(entries, logits, np.arange(len(entries)), tokens)

    def _score_chunks(self, count: int) -> Iterator[slice]:
        """Chunks of `count` tokens whose logits are computed at once."""
        if self._dp_step is not None and self._dp_step.has_scores:
            return self._dp_step.rounds()
        chunk = self._score_chunk
        return (slice(first, first + chunk) for first in range(0, count, chunk))

    def _sample(
        self, plan: StepPlan, batch: Batch, logits: Tensor, mask_of: MaskOf | None
    ) -> Sampled:
        """Sample on rank 0 and broadcast, so that every rank enters the same tokens."""
        where = self.forward.targets(batch)
        if self._ranks.rank:
            tokens = torch.zeros(len(batch.sampling), dtype=torch.int64, device=self._device)
            tokens = self._ranks.broadcast(tokens)
            self._table.enter(*where, tokens)
            return Sampled(tokens)
        slots, positions = batch.to_slots, batch.to_positions
        masks, failed = _masks_of(plan, batch, mask_of)
        past = histories(batch, self._table) if batch.branches else None
        if self._table.processed:
            logits, faults = self._processors.apply(logits, slots, positions, past)
            failed |= faults
        sampled = self._sampler.sample(logits, slots, positions, masks, where, past)
        tokens = sampled.tokens
        if self._drafting is not None and self._is_relaxed:
            tokens = self._drafting.relaxed(batch, tokens, sampled.edited_logits(logits))
            self._table.enter(*where, tokens)
        if self._ranks.size > 1:
            tokens = self._ranks.broadcast(tokens)
        return replace(sampled, tokens=tokens, failed=sampled.failed | failed)


def _masks_of(
    plan: StepPlan, batch: Batch, mask_of: MaskOf | None
) -> tuple[dict[int, bytes], dict[int, str]]:
    """Grammar masks by output, and why outputs failed. Waits for masks that are not ready."""
    masks: dict[int, bytes] = {}
    failed: dict[int, str] = {}
    ready = {mask.row: mask.bits for mask in plan.masks}
    for i, at in enumerate(batch.sampling.tolist()):
        if not batch.rows[at].masked or (i and batch.sampling[i - 1] == at):
            continue
        index = int(batch.indices[at])
        try:
            if index in ready:
                packed = ready[index]
            elif mask_of is None:
                raise RowError("the row is masked and nothing delivers masks")
            else:
                packed = mask_of(index)
        except Exception as error:  # a broken grammar fails only its own row
            failed[i] = f"the grammar mask did not come: {error}"
        else:
            # One mask for the last known token and one for each draft, side by side.
            size = len(packed) // (batch.rows[at].drafts + 1)
            for k in range(batch.rows[at].drafts + 1):
                masks[i + k] = packed[k * size : (k + 1) * size]
    return masks, failed


_NO_CHANGE: AbstractContextManager[object] = nullcontext()


class DeviceThread:
    """The thread that launches steps stays in inference mode; other threads enter it per launch.

    Reading a step's weights evicts torch's code from the CPU caches, so entering inference mode in
    every step costs about 60 µs, much in a short step.
    """

    def __init__(self) -> None:
        self._thread = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Make the calling thread the device thread until this ends."""
        with torch.inference_mode():
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = 0

    def inference_mode(self) -> AbstractContextManager[object]:
        """Inference mode for the calling thread."""
        is_here = threading.get_ident() == self._thread
        return _NO_CHANGE if is_here else torch.inference_mode()
