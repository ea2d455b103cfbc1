"""ExpertRecord: which experts tokens choose, as counts or one by one
(/start_expert_distribution_record).

Only rank 0 of a replica keeps it: every rank routes the same, and stages exchange their choices.
The record is in memory until it is dumped; a dump contains plain arrays (`formats/safetensors.py`).
"""

import os
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from banyan.base.errors import RequestError
from banyan.base.log import logger
from banyan.config.schema import Config, ExpertsConfig
from banyan.formats.arrays import write_arrays
from banyan.layers.build import Build
from banyan.messages.control_ops import ControlOp, RecordExperts
from banyan.messages.plan import EXPERTS
from banyan.model_config.model_config import ExpertFacts, ModelConfig
from banyan.models.decoder import layers_of
from banyan.moe.expert_watch import ExpertWatch
from banyan.moe.rules import balances_by_itself
from banyan.ops.api import Recorder
from banyan.parallel.groups import Groups
from banyan.platform.base import Traits
from banyan.runner.batch import Batch
from banyan.runner.control_ops import Finish, RankReply

log = logger(__name__)

USUAL_PASSES = 1000


def open_expert_watch(
    config: Config,
    model_config: ModelConfig,
    groups: Groups,
    traits: Traits,
    recorder: Recorder | None,
    device: torch.device,
) -> ExpertWatch | None:
    """The watch of the model that is loaded next; None if nothing needs it."""
    experts, facts, stages = config.experts, model_config.experts, groups.stages
    if facts is None or not (experts.recorder or experts.balances or experts.are_returned):
        return None
    is_first = not groups.world.rank or stages.size > 1 or balances_by_itself(config)
    if traits.is_host and not is_first:  # on devices all ranks must run steps in the same way
        return None
    sparse = ExpertLayers.of(facts, model_config.num_layers).sparse
    parts = [layers_of(model_config.num_layers, stage, stages.size) for stage in range(stages.size)]
    return ExpertWatch(
        recorder,
        None if groups.dp_batch is None else groups.dp_batch.tokens,
        stages,
        [sum(layer in part for layer in sparse) for part in parts],
        facts.per_token,
        is_recorded=bool(experts.recorder),
        device=device,
    )


def refuse_to_record(order: ControlOp) -> Finish:
    raise RequestError(
        "Choices of experts are not recorded: start with --expert-distribution-recorder-mode."
    )


def prepare_nothing(order: ControlOp) -> Finish:
    """For ranks without a record."""
    return lambda: RankReply("")


def open_expert_record(
    experts: ExpertsConfig, model_config: ModelConfig, build: Build, name: str, report_every: int
) -> "ExpertRecord | None":
    """None on ranks without a record. With DP attention the first replica counts the choices of
    all; each replica keeps single choices of its own tokens.

    Args:
        name: of this engine, for file names.
        report_every: steps between two log lines.
    """
    watch, groups, keeps_tokens = build.watch, build.groups, experts.recorder == "per_token"
    if not experts.recorder or watch is None or model_config.experts is None:
        return None
    if (groups.world if keeps_tokens else groups.everyone).rank:
        return None
    facts, layers = model_config.experts, model_config.num_layers
    places = ExpertLayers.of(facts, layers)
    if groups.everyone.rank:  # the first one reports on all
        experts = replace(experts, reports=False)
    record = ExpertRecord(experts, places, groups.experts.size, name, report_every, watch.own)
    watch.observers.append(record.ran)
    return record


@dataclass(frozen=True)
class ExpertLayers:
    """Attributes:
    count, per_token: experts of a layer, and how many a token chooses.
    layers: of the model.
    sparse: layers with experts.
    """

    count: int
    per_token: int
    layers: int
    sparse: tuple[int, ...]

    @classmethod
    def of(cls, facts: ExpertFacts, layers: int) -> "ExpertLayers":
        sparse = tuple(at for at in range(layers) if at not in facts.dense_layers)
        return cls(facts.count, facts.per_token, layers, sparse)


class ExpertRecord:
    """Args:
    shares: ranks with equal numbers of experts, in order.
    own: selects the choices of this replica's tokens in a step; None = all.
    """

    def __init__(
        self,
        experts: ExpertsConfig,
        places: ExpertLayers,
        shares: int = 1,
        name: str = "engine0",
        report_every: int = 40,
        own: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self._mode, self._own = experts.recorder, own
        self._places, self._shares, self._name = places, shares, name
        self._folder = experts.folder or tempfile.gettempdir()
        room = experts.buffer or USUAL_PASSES
        self._room = None if room < 0 else room
        self._is_recording = False
        self._report_every = report_every if experts.reports else 0
        self._evenness: list[float] = []
        self._empty()

    def _empty(self) -> None:
        self.passes = 0
        self._sum = np.zeros((len(self._places.sparse), self._places.count), np.int64)
        self._counts: deque[np.ndarray] = deque(maxlen=self._room)
        self._choices: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=self._room)

    def ran(self, chosen: np.ndarray, positions: np.ndarray) -> None:
        """Count a step. chosen: [layers with experts, tokens, per_token]."""
        if not self._is_recording and not self._report_every:
            return
        counts = counts_of(chosen, self._places.count)
        if self._report_every:
            self._evenness.append(evenness(counts, self._shares))
            if len(self._evenness) >= self._report_every:
                self._report()
        if not self._is_recording:
            return
        self.passes += 1
        if self._mode == "per_token":
            mine = chosen if self._own is None else self._own(chosen)
            self._choices.append((mine.transpose(1, 0, 2), positions))
            return
        if self._room is None and self._mode != "per_pass":
            self._sum += counts
        else:
            self._counts.append(counts)

    def prepare(self, order: ControlOp) -> Finish:
        """Raises:
        RequestError: nothing has been recorded, or the file cannot be written.
        """
        assert isinstance(order, RecordExperts)
        if order.what == "start":
            return self._start
        if order.what == "stop":
            if not self._is_recording:
                raise RequestError("Nothing is recorded; POST /start_expert_distribution_record.")
            return self._stop
        if not self.passes:
            raise RequestError("No pass has been recorded since the start of the record.")
        if not (os.path.isdir(self._folder) and os.access(self._folder, os.W_OK | os.X_OK)):
            raise RequestError(f"{self._folder[:200]!r} is not a folder that can be written.")
        name = f"expert_distribution_recorder_{self._name}_{order.time_us}.safetensors"
        path, facts = os.path.join(self._folder, name), {"mode": self._mode}
        try:
            write_arrays(path, self._arrays(), facts | {"passes": str(self.passes)})
        except OSError as error:
            raise RequestError(f"The record could not be written: {error}") from None
        return lambda: self._dumped(path)

    def _start(self) -> RankReply:
        self._empty()
        self._is_recording = True
        return RankReply("Start recording expert distribution.")

    def _stop(self) -> RankReply:
        self._is_recording = False
        return RankReply(f"Stop recording expert distribution after {self.passes} passes.")

    def _dumped(self, path: str) -> RankReply:
        passes = self.passes
        self._empty()
        log.info("expert record of %d passes: %s", passes, path)
        return RankReply(f"Dump expert distribution record of {passes} passes: {path}")

    def _arrays(self) -> dict[str, np.ndarray]:
        """Arrays of a dump; layers without experts have counts of zero."""
        if self._mode == "per_token":
            chosen = [ids for ids, _ in self._choices]
            return {
                "layers": np.array(self._places.sparse, np.int64),
                "tokens_of_pass": np.array([len(ids) for ids in chosen], np.int64),
                "positions": np.concatenate([at for _, at in self._choices]),
                "topk_ids": np.ascontiguousarray(np.concatenate(chosen)),
            }
        if self._mode == "per_pass":
            return {"logical_count_of_pass": self._of_all_layers(np.stack(self._counts))}
        whole = sum(self._counts, self._sum)
        found = {"logical_count": self._of_all_layers(whole)}
        if self._counts:
            rate = float(np.mean([evenness(counts, self._shares) for counts in self._counts]))
            found["average_utilization_rate_over_window"] = np.array([rate])
        return found

    def _of_all_layers(self, counts: np.ndarray) -> np.ndarray:
        shape = (*counts.shape[:-2], self._places.layers, counts.shape[-1])
        found = np.zeros(shape, np.int64)
        found[..., list(self._places.sparse), :] = counts
        return found

    def _report(self) -> None:
        passes, self._evenness = self._evenness, []
        log.info(
            "expert balancedness=%.3f passes=%d lowest=%.3f",
            float(np.mean(passes)),
            len(passes),
            min(passes),
        )


def counts_of(chosen: np.ndarray, count: int) -> np.ndarray:
    """How often each expert is chosen: [layers, count] int64 from [layers, tokens, per_token]."""
    layers = len(chosen)
    shifted = chosen.reshape(layers, -1) + np.arange(layers)[:, None] * count
    return np.bincount(shifted.ravel(), minlength=layers * count).reshape(layers, count)


def evenness(counts: np.ndarray, shares: int) -> float:
    """Mean load over the largest, averaged over layers: of ranks, or of experts if one rank has
    all. 1 = balanced. counts: [layers, experts]."""
    loads = counts.reshape(len(counts), shares, -1).sum(-1) if shares > 1 else counts
    most = loads.max(-1)
    return float(np.mean(loads.mean(-1)[most > 0] / most[most > 0])) if most.any() else 1.0


def returned_experts(
    watch: ExpertWatch | None, chosen: np.ndarray, batch: Batch, model_config: ModelConfig
) -> dict[int, Tensor]:
    """Choices of a step for requests that ask for them; also notifies the observers. Every rank
    that ran the step calls this.

    chosen: `ExpertWatch.chosen` after the step.
    returns: for rows with EXPERTS: index in the plan -> int32 [positions, layers, per_token], best
        first; 0 in layers without experts.
    """
    asks = bool(batch.wanted & EXPERTS)
    if watch is None or not (asks or watch.is_recorded):
        return {}
    mine = watch.own(watch.whole(chosen, batch.positions))
    facts, found = model_config.experts, dict[int, Tensor]()
    assert facts is not None
    sparse = [layer for layer in range(model_config.num_layers) if layer not in facts.dense_layers]
    for at in batch.wanting(EXPERTS):
        skipped = max(0, batch.rows[at].hidden_from - int(batch.starts[at]))
        tokens = slice(int(batch.offsets[at]) + skipped, int(batch.offsets[at + 1]))
        of_row = mine[:, tokens]
        whole = np.zeros((of_row.shape[1], model_config.num_layers, facts.per_token), np.int32)
        whole[:, sparse] = of_row.swapaxes(0, 1)
        found[int(batch.indices[at])] = torch.from_numpy(whole)
    return found
