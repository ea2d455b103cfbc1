"""What a step produces on the device, and the StepResult that the engine receives.

BegunStep → (sampling) → StepOutputs → `build_result` → StepResult, which LaunchedStep waits for.
"""

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.base.log import logger, printable
from banyan.formats.arrays import read_arrays
from banyan.lora.slots import AdapterSlots
from banyan.messages.plan import (
    HIDDEN,
    POOL,
    CopyResult,
    PieceFailure,
    RowFailure,
    RowScores,
    StepPlan,
    StepResult,
)
from banyan.model_config.model_config import CLS, MEAN, DenseFacts, Pooling
from banyan.models.base import Model
from banyan.ops.lora import AdapterTokens
from banyan.platform.base import Platform
from banyan.runner.batch import Batch
from banyan.runner.forward import Forward
from banyan.runner.logprobs import StepScores
from banyan.runner.multi_step import MultiStep
from banyan.runner.sampler import ALL_BANNED, Sampled
from banyan.runner.speculative.drafting import Verified

log = logger(__name__)


@dataclass(frozen=True)
class BegunStep:
    """A plan whose rows have run through this rank's layers.

    Attributes:
        failed: index in the plan -> why this row could not run.
        spoilt: contents that could not become features.
        chosen: experts that the tokens chose in these layers; None = not recorded.
    """

    plan: StepPlan
    batch: Batch
    failed: dict[int, str]
    spoilt: list[PieceFailure] = field(default_factory=list[PieceFailure])
    multi_step: MultiStep | None = None
    chosen: np.ndarray | None = None

    @property
    def has_run(self) -> bool:
        return bool(self.batch.rows or self.plan.replica_loads)


@dataclass(frozen=True)
class StepOutputs:
    """Everything a step produces; tensors may still be on the device.

    Attributes:
        hidden: index in the plan -> hidden states [positions, hidden], or expert choices.
        verified: None = no drafter, or no row samples.
        multi_step: the steps before the last one; None = the plan had one step.
    """

    sampled: Sampled | None = None
    scores: StepScores | None = None
    vectors: Tensor | None = None
    hidden: dict[int, Tensor] | None = None
    verified: Verified | None = None
    multi_step: MultiStep | None = None

    def fetch(self, platform: Platform) -> Callable[[], list[Tensor]]:
        """Begin to copy the tensors to the host: tokens and best logits (unless they are there),
        then scores, vectors, hidden states."""
        tensors: list[Tensor] = []
        if self.sampled is not None and self.sampled.here is None:
            tensors.append(self.sampled.tokens)
            if self.sampled.best is not None:
                tensors.append(self.sampled.best)
        if self.scores is not None:
            tensors += self.scores.tensors
        if self.vectors is not None:
            tensors.append(self.vectors)
        return platform.fetch([*tensors, *(self.hidden or {}).values()])


class _Dense:
    """A projection of vectors, in fp32.

    Raises:
        ModelError: the file does not hold it.
    """

    def __init__(self, facts: DenseFacts) -> None:
        found = read_arrays(facts.path)
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": (facts.outputs, facts.inputs)}
        if facts.has_bias:
            shapes["linear.bias"] = (facts.outputs,)
        for name, shape in shapes.items():
            if name not in found or found[name].shape != shape:
                raise ModelError(
                    f"{printable(facts.path)!r} has no float tensor {name} of shape {shape}",
                    hint="download it again, or convert it to float32",
                )
        self._parts = {name: torch.from_numpy(found[name]).float() for name in shapes}
        self._activation = torch.tanh if facts.activation == "tanh" else lambda x: x

    def __call__(self, vectors: Tensor) -> Tensor:
        parts = {name: part.to(vectors.device) for name, part in self._parts.items()}
        found = torch.nn.functional.linear(
            vectors, parts["linear.weight"], parts.get("linear.bias")
        )
        return self._activation(found)


class Pooler:
    """Pools the hidden states of a row into one vector.

    Args:
        pooling: which tokens count.
        model: its head, if any, turns the pooled states into class scores.
        adapters: LoRA adapters by slot; the head may depend on them too.
    """

    def __init__(
        self, pooling: Pooling, model: Model, adapters: AdapterSlots | None = None
    ) -> None:
        self._adapters = adapters
        self._pooling = pooling
        self._model = model
        self._dense = [_Dense(facts) for facts in pooling.dense]

    def read(self, forward: Forward, batch: Batch) -> Tensor | None:
        """Vectors of the rows with POOL, [n, width] fp32; None = there are none."""
        if not batch.wanted & POOL:
            return None
        rows = np.array(batch.wanting(POOL))
        if self._adapters is not None and self._adapters.has_outputs:
            self._adapters.fill_outputs(AdapterTokens(len(rows)), batch.offsets[rows])
        vectors = self._model.classify(self._pool(forward, batch, rows)).float()
        for dense in self._dense:
            vectors = dense(vectors)
        if self._pooling.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return vectors

    def _pool(self, forward: Forward, batch: Batch, rows: np.ndarray) -> Tensor:
        """returns: [n, hidden]."""
        firsts, ends = batch.offsets[rows], batch.offsets[rows + 1]
        if self._pooling.kind == MEAN:
            spans = zip(firsts, ends, strict=True)
            return torch.stack([forward.hidden(np.arange(a, b)).mean(0) for a, b in spans])
        return forward.hidden(firsts if self._pooling.kind == CLS else ends - 1)


def read_hidden_states(forward: Forward, batch: Batch) -> dict[int, Tensor]:
    """Hidden states of the rows with HIDDEN: index in the plan -> [positions, hidden]."""
    found: dict[int, Tensor] = {}
    for at in batch.wanting(HIDDEN):
        skipped = max(0, batch.rows[at].hidden_from - int(batch.starts[at]))
        tokens = np.arange(batch.offsets[at] + skipped, batch.offsets[at + 1])
        found[int(batch.indices[at])] = forward.hidden(tokens).float()
    return found


def build_result(
    begun: BegunStep, outputs: StepOutputs, fetch: Callable[[], list[Tensor]]
) -> StepResult:
    """The step's result as the engine takes it. Waits for the device.

    Args:
        fetch: from `StepOutputs.fetch`.
    """
    plan, batch = begun.plan, begun.batch
    tokens = [b""] * len(plan.rows)
    failed = dict(begun.failed)
    here = iter(fetch())
    sampled, scores, verified = outputs.sampled, outputs.scores, outputs.verified
    if sampled is not None:
        indices = batch.indices[batch.sampling].tolist()
        accepted = [True] * len(indices) if verified is None else verified.accepted.tolist()
        if outputs.multi_step is not None:
            for index, earlier in zip(indices, outputs.multi_step.earlier, strict=True):
                tokens[index] = earlier.tobytes()
        if sampled.here is not None:
            ids, best = sampled.here
        else:
            ids = next(here)
            best = None if sampled.best is None else next(here)
        for index, token, is_accepted in zip(indices, ids.tolist(), accepted, strict=True):
            if is_accepted:
                tokens[index] += struct.pack("=i", token)
        for i, text in sampled.faults(best).items():
            if accepted[i]:
                failed[indices[i]] = text
    for index in failed:
        tokens[index] = b""
    scored: list[RowScores] = []
    if scores is not None:
        cut = {} if verified is None else verified.cut
        scored = scores.rows(list(islice(here, 4)), without=set(failed), cut=cut)
    pooled: list[bytes] = []
    if outputs.vectors is not None:
        pooled = [b""] * len(plan.rows)
        values = next(here).numpy()
        for index, value in zip(batch.indices[batch.wanting(POOL)], values, strict=True):
            pooled[index] = value.tobytes()
    states: list[bytes] = []
    if outputs.hidden:
        states = [b""] * len(plan.rows)
        for index, tensor in zip(outputs.hidden, here, strict=True):
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
        spoilt=begun.spoilt,
    )


def failed_result(plan: StepPlan, error: Exception) -> StepResult:
    return StepResult(step=plan.step, error=f"{type(error).__name__}: {error}")


def finish_after(
    wait: Callable[[], object], finish: Callable[[], StepResult]
) -> Callable[[], StepResult]:
    """`finish`, after `wait`."""

    def both() -> StepResult:
        wait()
        return finish()

    return both


class LaunchedStep:
    """A launched step. `seconds` of the result counts launching and waiting, not the time between.

    Args:
        copies: result of the plan's page copies, valid once the step has run.
        is_broken: the launch failed, so it is unknown which copies were made.
    """

    def __init__(
        self,
        plan: StepPlan,
        copies: CopyResult,
        finish: Callable[[], StepResult],
        launch_s: float,
        is_broken: bool = False,
    ) -> None:
        self._plan = plan
        self._copies = copies
        self._finish = finish
        self._launch_s = launch_s
        self._is_broken = is_broken

    def result(self) -> StepResult:
        """The result; waits for the device."""
        began = time.perf_counter()
        try:
            result = self._finish()
        except Exception as error:
            log.exception("step=%d failed", self._plan.step)
            result = failed_result(self._plan, error)
        seconds = self._launch_s + time.perf_counter() - began
        return StepResult(
            step=self._plan.step,
            tokens=result.tokens,
            scores=result.scores,
            failed=result.failed,
            error=result.error,
            seconds=seconds,
            drafts=result.drafts,
            vectors=result.vectors,
            hidden=result.hidden,
            draft_seconds=result.draft_seconds,
            parents=result.parents,
            spoilt=result.spoilt,
        )

    def copies(self) -> CopyResult | None:
        """The plan's page copies that ended with the step; None = it had none."""
        ids, failed = self._copies.ids, self._copies.failed
        if not ids and not failed:
            return None
        return CopyResult(ids=[], failed=[*ids, *failed]) if self._is_broken else self._copies
