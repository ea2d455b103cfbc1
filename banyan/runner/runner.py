"""ModelRunner: carries out step plans on tensors. Reads top to bottom like a story.

Obeys plans and decides nothing. A row that cannot be run or sampled fails alone; a forward that
fails, fails its step. With several ranks each runs the same plan; rank 0 samples and tells the
others the tokens.
"""

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

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
    Row,
    RowFailure,
    RowScores,
    StepPlan,
    StepResult,
)
from banyan.model_config.model_config import FULL, STATE, WINDOW
from banyan.models.base import Model
from banyan.moe.routing_record import returned_experts
from banyan.ops.api import OpTime
from banyan.ops.host import sent
from banyan.platform.base import Platform
from banyan.platform.cpu import CpuPlatform
from banyan.runner.abilities import Abilities
from banyan.runner.attention import BACKENDS
from banyan.runner.batch import Batch, histories
from banyan.runner.choose_forward import RunnerConfig, open_forward
from banyan.runner.device_thread import Home
from banyan.runner.draft_trees import Compaction, branches_of
from banyan.runner.forward import Forward
from banyan.runner.kvstore import KVStore
from banyan.runner.multi_step import MultiStep
from banyan.runner.pending import BegunStep, PendingStep, after, failed
from banyan.runner.pooling import Pooler
from banyan.runner.rank_pages import copy_after
from banyan.runner.sampling.logprobs import CHUNK_ELEMENTS, ScoredPositions, StepScores
from banyan.runner.sampling.processors import Processors
from banyan.runner.sampling.sampler import ALL_BANNED, Sampled, Sampler
from banyan.runner.slots import RowError, SlotTable
from banyan.runner.speculative.base import Drafter, DraftRunner
from banyan.runner.speculative.draft_runner import DraftModel, open_draft_runner
from banyan.runner.speculative.drafting import Drafting, TargetHiddenStates, Verified

log = logger(__name__)

MaskOf = Callable[[int], bytes]
"""Waits for the mask bits of a masked row, given its index in the plan."""


class ModelRunner:
    """One rank's executor.

    Args:
        build: what the model was made from: kernels, ranks, device.
        platform: of the device; None = the CPU's.
        open_mover: opens what carries pages beyond the device; None = they stay there.
        open_drafter: opens what guesses next tokens, given how to open a model beside this one;
            None = rows bring no drafts.
        draft: the model to open beside this one; None where nothing needs it.
        rack: the adapters that joins may name; None = there are none.
    """

    def __init__(
        self,
        model: Model,
        build: Build,
        sizes: RunnerConfig,
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
        self._table = SlotTable(
            *(sizes.max_slots, sizes.max_length, model_config.vocab_size, sizes.groups, device),
            is_drafting=open_drafter is not None,
            adapters=None
            if lora_pool is None
            else AdapterSlots(sizes.max_slots + 1, lora_pool, build.groups),
            multi_steps=sizes.multi_step > 1,
        )
        draft_runner = [] if draft is None else draft.model.caches
        caches = numbered_through([model.caches, draft_runner])
        can_go_back = self.platform.traits.is_host and not sizes.branching
        rollback_checkpoints = sizes.draft_room if open_drafter is not None and can_go_back else 0
        self.store = KVStore(
            sizes.groups,
            caches,
            device,
            sizes.shares_pages,
            self.platform.stream,
            rollback_checkpoints,
        )
        self.mover = None if open_mover is None else open_mover(self.store)
        self._model_config = model_config
        taps = () if draft is None or draft.reads is None else draft.reads.aux_layers
        reads_all = sizes.reads_all or (draft is not None and draft.reads is not None and not taps)
        self._sizes = replace(sizes, taps=taps, reads_all=reads_all)
        self.home = Home()
        self.bell: int | None = None
        """An eventfd by which running plans wake the loop; None = nobody listens."""
        self.marks = Marks("runner")
        """Of the thread that launches; what a profiler records."""
        self._sampler = Sampler(self._table, model_config.vocab_size, build.ops)
        self._processors = Processors(self._table)
        self._drafting = None
        self._ran = TargetHiddenStates(bool(taps))
        """What drafters read of the last step."""
        if open_drafter is not None:
            whole = (self._table, self.store, sizes, self.platform, draft, self._ran)
            compaction = None
            if sizes.branching:
                layers = 1 + max((cache.layer for cache in model.caches), default=-1)
                compaction = Compaction(self._table, self.store, layers, build.ops)
            drafter = open_drafter(partial(open_draft_runner, *whole))
            mine = (self._table, self._ran, self.store, compaction, sizes.branching)
            self._drafting = Drafting(drafter, *mine)
        self._score_chunk = max(1, CHUNK_ELEMENTS // model_config.vocab_size)
        self._peers: DPAttentionStep | None = None
        joint = build.groups.joint
        if joint is not None:
            # One round is one exchange, however a replica goes through the model.
            self._peers = DPAttentionStep(joint, min(self._score_chunk, sizes.max_slots))
        self.take_model(model)

    def take_model(self, model: Model) -> None:
        """Run `model`, of the same card, from the next step on."""
        self.platform.synchronize()
        self.model: Model | None = model
        model_config = self._model_config
        usual = "encoder" if model_config.is_encoder else "paged"
        backend = self._sizes.attention or usual
        attention = BACKENDS.load(backend)(self._build.ops, self.store)
        with self.platform.stream():
            self._forward = open_forward(
                *(model, self._table, self.store, self._build, self._sizes),
                *(attention, self.platform),
            )
        self.platform.synchronize()
        self._pooler = None
        if model_config.pooling is not None:
            self._pooler = Pooler(model_config.pooling, model, self._table.adapters)

    def drop_model(self) -> None:
        """Let go of the model; no rows can run until another one is taken."""
        self.platform.synchronize()
        del self._forward, self._pooler
        self.model = None

    def launch(self, plan: StepPlan, mask_of: MaskOf | None = None) -> PendingStep:
        """Run a plan: leaves, joins, grants, copies before, rows, copies after. Never raises."""
        began = time.perf_counter()
        with self.home.mode(), self.platform.stream():
            copies = self.begin_copies(plan.copies)
            try:
                finish = self._execute(plan, mask_of)
            except Exception as error:
                log.exception("step=%d failed", plan.step)
                result = failed(plan, error)
                launch_s = time.perf_counter() - began
                return PendingStep(plan, copies, lambda: result, launch_s, is_broken=True)
        return PendingStep(plan, copies, finish, time.perf_counter() - began)

    @property
    def abilities(self) -> Abilities:
        """What plans may ask of this runner."""
        return Abilities(
            groups=(FULL, WINDOW, STATE),
            copies=True,
            tiers=(DEVICE,) if self.mover is None else (DEVICE, STORE, PEER),
            drafts=self._drafting is not None,
            goes_back=self.store.rollback_checkpoints > 0,
            peers=self._peers is not None,
            adapters=self._table.adapters is not None,
            text=self._pooler is None,
            vectors=self._pooler is not None,
            hidden=True,
            multi_steps=self._forward.is_recorded
            and self._pooler is None
            and self._drafting is None
            and self._ranks.size == 1,
        )

    @property
    def drafting(self) -> Drafting | None:
        """None where rows bring no drafts."""
        return self._drafting

    @property
    def how(self) -> str:
        """How steps go through the model: "recorded", "captured" or "eager"."""
        return self._forward.how

    @property
    def is_recorded(self) -> bool:
        """Whether steps are replayed, so that their ops can be timed."""
        return self._forward.is_recorded

    def ring_next(self) -> bool:
        """Ring the bell once when the rows of the next plan run; False where that cannot be."""
        recorder = self._build.ops.recorder
        if recorder is None or self.bell is None:
            return False
        recorder.ring_next(self.bell)
        return True

    def interrupt(self, step: StepId) -> None:
        """MultiStepRunner of plans up to this one end with the step that runs; from any thread."""
        self._forward.interrupt(step)

    def told(self, step: StepId) -> dict[int, bytes] | None:
        """What the rows of the burst that runs have sampled so far: index in the plan -> int32 ids;
        None when it is another plan's. From any thread."""
        return self._forward.told(step)

    def op_times(self) -> list[OpTime]:
        """What the stages of the last step took; ConfigError where steps are not recorded."""
        return self._forward.op_times()

    def begin_copies(self, copies: list[PageCopy]) -> CopyResult:
        """Hand over those to and from the store; what is to be told of the others."""
        mine = [copy.id for copy in copies if copy.is_on_device]
        if self.mover is None:
            return CopyResult(mine, [copy.id for copy in copies if not copy.is_on_device])
        self.mover.start(copies)
        return CopyResult(mine)

    def _execute(self, plan: StepPlan, mask_of: MaskOf | None) -> Callable[[], StepResult]:
        begun = self.begin(plan)
        finish = self.end(begun, mask_of)
        met = copy_after(self.store, plan.copies, self._ranks)
        return finish if met is None else after(self.platform.fetch([met]), finish)

    def begin(self, plan: StepPlan, carry: Callable[[Batch], Tensor] | None = None) -> BegunStep:
        """Enter a plan and run its rows through the layers that are here.

        Args:
            carry: brings what the stage before makes of a batch, [tokens, hidden].
        """
        table, marks = self._table, self.marks
        marks.begin()
        table.leave(plan.leaves)
        table.join(plan.joins)
        table.grant(plan.grants)
        self.store.copy(plan.copies, "before")
        if self._drafting is not None:
            self._drafting.enter(plan)
        batch, failed = self._admit(plan.rows, plan.steps > 1)
        if self._peers is not None and (plan.rows or plan.peers):
            self._peers.begin(plan.peers)
        marks.end("enter", step=plan.step)
        if not batch.rows and not plan.peers:
            return BegunStep(plan, batch, failed)
        if carry is not None:
            batch = replace(batch, carried=carry(batch))
        multi_step, watch = self._run(batch, plan), self._build.watch
        return BegunStep(plan, batch, failed, multi_step, None if watch is None else watch.chosen)

    def left(self, begun: BegunStep) -> Tensor:
        """What the next stage goes on with, good until the next plan is begun; [tokens, hidden]."""
        return self._forward.left(begun.batch)

    def turn_to(self, begun: BegunStep) -> None:
        """Let `end` be of this one, though others may have been begun since."""
        self._forward.turn_to(begun.batch)

    def end(self, begun: BegunStep, mask_of: MaskOf | None) -> Callable[[], StepResult]:
        """Sample, and read out what else is wanted; what then gives the result."""
        plan, batch, failed, multi_step = begun.plan, begun.batch, begun.failed, begun.multi_step
        sampled, scores, verified, vectors, hidden = None, None, None, None, None
        if begun.has_run:
            sampled, scores, verified = self._read_out(plan, batch, mask_of)
            if multi_step is not None:
                self._table.grow(batch.to_slots, multi_step.steps - 1)
            if self._drafting is not None and verified is not None:
                self._drafting.draft(batch, verified, len(plan.rows))
            if self._pooler is not None:
                vectors = self._pooler.read(self._forward, batch)
            if batch.wanted & HIDDEN:
                hidden = _hidden_states(self._forward, batch)
            if begun.chosen is not None:
                told = returned_experts(self._build.watch, begun.chosen, batch, self._model_config)
                hidden = (hidden or {}) | told
        outcome = StepOutputs(sampled, scores, vectors, hidden or {}, verified, multi_step)
        finish = partial(_result, plan, batch, failed, outcome, outcome.fetch(self.platform))
        if not batch.rows or self._forward.results_are_final:
            return finish
        result = finish()  # the step has ended, and the next one writes into the same memory
        self.marks.end("read out")
        return lambda: result

    def _run(self, batch: Batch, plan: StepPlan) -> MultiStep | None:
        """The forward pass; with its ops, one after another, while a trace is recorded. What comes
        before the last step of a burst."""
        times: list[OpTime] = []
        trace = self.marks.trace
        self._forward.watch = None if trace is None else times.extend
        multi_step = None
        if plan.steps > 1:
            steps = min(row.count for row in plan.rows)
            bell = -1 if self.bell is None else self.bell
            multi_step = self._forward.multi_step(batch, steps, plan.step, plan.tell, bell)
        if multi_step is None:
            self._forward.run(batch)
        if self._build.watch is not None:
            self._build.watch.ran(batch.positions)
        at = self.marks.end("forward", rows=len(batch.rows), tokens=int(batch.offsets[-1]))
        for stage in times:
            if trace is not None and at:
                trace.add("ops", stage.name, at, stage.seconds, bytes=stage.bytes)
            at += stage.seconds
        return multi_step

    def _admit(self, rows: list[Row], in_multi_step: bool) -> tuple[Batch, dict[int, str]]:
        """The rows that can run, and why the others cannot. The same on every rank."""
        good: list[tuple[int, Row]] = []
        failed: dict[int, str] = {}
        agreed, spare = self._peers is not None, 0
        for index, row in enumerate(rows):
            try:
                if row.want & POOL and self._pooler is None:
                    raise RowError("this model is not served for pooled vectors")
                exact = self._table.prepare(row, bool(row.want & SAMPLE))
            except RowError as error:
                failed[index] = str(error)
                if agreed:  # the others count on so many tokens
                    good.append((index, Row(PADDING_SLOT, 0, row.count)))
            else:
                if in_multi_step:  # of which each step runs one position
                    exact = msgspec.structs.replace(exact, count=1, drafts=0)
                good.append((index, exact))
                spare += row.count - exact.count if agreed else 0
                if row.given and self._drafting is not None:
                    self._drafting.give(row)
        while spare > 0:  # fewer drafts than were agreed
            good.append((len(rows), Row(PADDING_SLOT, 0, min(spare, self._table.max_length))))
            spare -= self._table.max_length
        return Batch.of(good, branches_of(good, self._table.parents)), failed

    def _read_out(
        self, plan: StepPlan, batch: Batch, mask_of: MaskOf | None
    ) -> tuple[Sampled | None, StepScores | None, Verified | None]:
        """Sample, verify and score; logits are made only for the positions that need them."""
        builder, scores = None, None
        if batch.wanted & SCORE:
            builder = ScoredPositions.of(batch, self._table)
            scores = StepScores(builder, batch, self._table, self._device, self._build.ops)
        self._score_known(batch, builder, scores)
        samples = bool(batch.wanted & SAMPLE)
        if not samples and (self._peers is None or not self._peers.has_outputs):
            return None, scores, self._verify(batch, None)
        sampled, logits = self._forward.next_tokens(), None
        if sampled is None:
            logits = self._forward.next_logits(batch)
            if not samples:
                return None, scores, self._verify(batch, None) if batch.rows else None
            sampled = self._sample(plan, batch, logits, mask_of)
        here = sampled if self._drafting is None else sampled.fetched(self.platform)
        verified = self._verify(batch, here)
        if builder is None or scores is None:
            return here, None, verified
        entries = np.flatnonzero(builder.is_sampled)
        if len(entries):
            rows = batch.outputs_at(builder.row[entries], builder.position[entries])
            if verified is not None:
                rows = verified.places[rows]
            chosen = sent(rows, self._device)
            assert logits is not None, "a step that scores does not sample by itself"
            scores.fill(entries, logits, rows, sampled.tokens[chosen])
        return here, scores, verified

    def _verify(self, batch: Batch, sampled: Sampled | None) -> Verified | None:
        """Which of the sampled tokens stand; the slots have them from now on."""
        if self._drafting is not None:
            self._ran.enter(batch, self._forward)
            return self._drafting.verify(batch, None if sampled is None else sampled.tokens)
        if sampled is not None:
            self._table.grow(batch.to_slots)
        return None

    def _score_known(
        self, batch: Batch, builder: ScoredPositions | None, scores: StepScores | None
    ) -> None:
        """Score the tokens that were there before the step, a bounded number of logits at once."""
        known = np.zeros(0, np.int64) if builder is None else np.flatnonzero(~builder.is_sampled)
        for part in self._rounds(len(known)):
            entries = known[part]
            if builder is None or scores is None or not len(entries):
                self._forward.logits(entries)  # those of other replicas
                continue
            row, position = builder.row[entries], builder.position[entries]
            before = batch.offsets[row] + position - 1 - batch.starts[row]
            logits = self._forward.logits(before)
            where = np.stack([batch.slots[row], position])
            slots, positions = sent(where, self._device)
            tokens = self._table.tokens[slots, positions].long()
            scores.fill(entries, logits, np.arange(len(entries)), tokens)

    def _rounds(self, count: int) -> Iterator[slice]:
        """Parts of `count` tokens whose logits are made at once."""
        if self._peers is not None and self._peers.has_scores:
            return self._peers.rounds()
        chunk = self._score_chunk
        return (slice(first, first + chunk) for first in range(0, count, chunk))

    def _sample(
        self,
        plan: StepPlan,
        batch: Batch,
        logits: Tensor,
        mask_of: MaskOf | None,
    ) -> Sampled:
        """Choose tokens on rank 0; every rank leaves with the same ones, entered in its table."""
        where = self._forward.targets(batch)
        if self._ranks.rank:
            tokens = torch.zeros(len(batch.sampling), dtype=torch.int64, device=self._device)
            tokens = self._ranks.broadcast(tokens)
            self._table.enter(*where, tokens)
            return Sampled(tokens)
        slots, positions = batch.to_slots, batch.to_positions
        failed: dict[int, str] = {}
        masks: dict[int, bytes] = {}
        ready = {mask.row: mask.bits for mask in plan.masks}
        for i, at in enumerate(batch.sampling.tolist()):
            if not batch.rows[at].masked or (i and batch.sampling[i - 1] == at):
                continue
            index = int(batch.indices[at])
            try:
                packed = ready[index] if index in ready else _wait_for(mask_of, index)
            except Exception as error:  # a grammar that breaks is its own row's alone
                failed[i] = f"the grammar mask did not come: {error}"
            else:
                size = len(packed) // (batch.rows[at].drafts + 1)
                for k in range(batch.rows[at].drafts + 1):
                    masks[i + k] = packed[k * size : (k + 1) * size]
        past = histories(batch, self._table) if batch.branches else None
        if self._table.processed:
            logits, faults = self._processors.apply(logits, slots, positions, past)
            failed |= faults
        sampled = self._sampler.sample(logits, slots, positions, masks, where, past)
        tokens = sampled.tokens
        if self._ranks.size > 1:
            tokens = self._ranks.broadcast(tokens)
        return Sampled(tokens, sampled.best, sampled.failed | failed)


@dataclass(frozen=True)
class StepOutputs:
    """What a step gives, on the device or fetched from it.

    Attributes:
        hidden: index in the plan -> [positions, hidden], or the experts that these chose.
        verified: None where nothing drafts, or no row samples.
        burst: the steps before the last one; None where there was one step.
    """

    sampled: Sampled | None
    scores: StepScores | None
    vectors: Tensor | None
    hidden: dict[int, Tensor]
    verified: Verified | None = None
    multi_step: MultiStep | None = None

    def fetch(self, platform: Platform) -> Callable[[], list[Tensor]]:
        """Begin to bring its tensors to the host: tokens and best, unless they are there, then
        scores, vectors, hidden."""
        tensors: list[Tensor] = []
        if self.sampled is not None and self.sampled.here is None:
            tensors.append(self.sampled.tokens)
            if self.sampled.best is not None:
                tensors.append(self.sampled.best)
        if self.scores is not None:
            tensors += self.scores.tensors
        if self.vectors is not None:
            tensors.append(self.vectors)
        return platform.fetch([*tensors, *self.hidden.values()])


def _hidden_states(forward: Forward, batch: Batch) -> dict[int, Tensor]:
    """Hidden states of the rows with HIDDEN: index in the plan -> [positions, hidden]."""
    found: dict[int, Tensor] = {}
    for at in batch.wanting(HIDDEN):
        skipped = max(0, batch.rows[at].hidden_from - int(batch.starts[at]))
        tokens = np.arange(batch.offsets[at] + skipped, batch.offsets[at + 1])
        found[int(batch.indices[at])] = forward.hidden(tokens).float()
    return found


def _wait_for(mask_of: MaskOf | None, row: int) -> bytes:
    if mask_of is None:
        raise RowError("the row is masked and nothing delivers masks")
    return mask_of(row)


def _result(
    plan: StepPlan,
    batch: Batch,
    failed: dict[int, str],
    outcome: StepOutputs,
    fetch: Callable[[], list[Tensor]],
) -> StepResult:
    """A step's outcome as the engine takes it; waits for the device."""
    tokens = [b""] * len(plan.rows)
    failed = dict(failed)
    here = iter(fetch())
    sampled, scores, verified = outcome.sampled, outcome.scores, outcome.verified
    if sampled is not None:
        indices = batch.indices[batch.sampling].tolist()
        stands = [True] * len(indices) if verified is None else verified.stands.tolist()
        if outcome.multi_step is not None:
            for index, earlier in zip(indices, outcome.multi_step.earlier, strict=True):
                tokens[index] = earlier.tobytes()
        if sampled.here is not None:
            ids, best = sampled.here
        else:
            ids = next(here)
            best = None if sampled.best is None else next(here)
        for index, token, is_good in zip(indices, ids.tolist(), stands, strict=True):
            if is_good:
                tokens[index] += struct.pack("=i", token)
        for i, text in sampled.faults(best).items():
            if stands[i]:
                failed[indices[i]] = text
    for index in failed:
        tokens[index] = b""
    scored: list[RowScores] = []
    if scores is not None:
        cut = {} if verified is None else verified.cut
        scored = scores.rows(list(islice(here, 4)), without=set(failed), cut=cut)
    pooled: list[bytes] = []
    if outcome.vectors is not None:
        pooled = [b""] * len(plan.rows)
        values = next(here).numpy()
        for index, value in zip(batch.indices[batch.wanting(POOL)], values, strict=True):
            pooled[index] = value.tobytes()
    states: list[bytes] = []
    if outcome.hidden:
        states = [b""] * len(plan.rows)
        for index, tensor in zip(outcome.hidden, here, strict=True):
            states[index] = tensor.numpy().tobytes()
    return StepResult(
        step=plan.step,
        tokens=tokens,
        scores=scored,
        failed=[
            RowFailure(i, failed[i], 400 if failed[i] == ALL_BANNED else 500)
            for i in sorted(failed)
        ],
        drafts=[] if verified is None else verified.drafts,
        parents=[] if verified is None else verified.parents,
        draft_seconds=0.0 if verified is None else verified.seconds,
        vectors=pooled,
        hidden=states,
    )
