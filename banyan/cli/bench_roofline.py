"""`banyan bench batch --roofline`: each op of a prefill step and of a decode step with its bound.

The ops are timed on a model of their own, before the engine that is measured as a whole starts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from banyan.bench import roofline
from banyan.bench.options import BatchOptions
from banyan.bench.probe import MachinePeaks, probe
from banyan.bench.roofline import FP32, INT8, OpCost
from banyan.config.defaults import settle
from banyan.config.schema import Config
from banyan.formats.gguf import GGUFFile
from banyan.formats.mapped import TensorInfo
from banyan.formats.safetensors import SafetensorsFile
from banyan.model_config.model_config import ModelConfig

if TYPE_CHECKING:
    from banyan.ops.api import Peaks
    from banyan.runner.profiler import OpTimer

_CACHE_BYTES = 4


@dataclass(frozen=True)
class Phase:
    """A step in which each of `rows` rows runs positions start … start + count − 1."""

    name: str
    rows: int
    start: int
    count: int

    @property
    def title(self) -> str:
        what = f"{self.rows} x {self.count} tokens"
        return f"Roofline of a {self.name} step, {what} after {self.start}"


@dataclass(frozen=True)
class Rooflines:
    """What bounds the steps of one model on this machine.

    Attributes:
        costs: of every op in a phase; empty where the steps of this model are not recorded.
        arithmetic: of the products in steps that are not recorded.
    """

    machine: MachinePeaks
    model_config: ModelConfig
    chunk_tokens: int
    costs: Mapping[Phase, list[OpCost]]
    arithmetic: str
    meter: "OpTimer"
    """Kept while the engine runs: its threads sleep."""
    shown: set[Phase] = field(default_factory=set)
    """Batches of different sizes may have the same prefill step; it is printed once."""

    def show(
        self, batch_size: int, input_len: int, output_len: int, keys: Mapping[str, object]
    ) -> dict[str, object]:
        """Print both phases of a combination against their bounds; the fractions as keys.

        Args:
            keys: what the whole engine took (`batch.results`).
        """
        found: dict[str, object] = {}
        for phase in _phases(batch_size, input_len, output_len, self.chunk_tokens):
            took = keys.get("median_decode_latency" if phase.name == "decode" else "")
            if self.costs:
                costs = self.costs[phase]
                alone_s = sum(cost.seconds for cost in costs)
                step_s = max(took, alone_s) if isinstance(took, float) else alone_s
            else:
                step_s = took if isinstance(took, float) else keys["prefill_latency"]
                assert isinstance(step_s, float)
                costs = [self._whole(phase, step_s, batch_size, input_len)]
            rows = roofline.op_rows(costs, step_s, self.machine)
            is_known = self.costs and phase.name == "prefill" and phase in self.shown
            if not is_known:
                print(roofline.table(phase.title, rows, step_s))
            self.shown.add(phase)
            bound_s = sum(row.bound_s for row in rows)
            found[f"{phase.name}_fraction_of_bound"] = bound_s / step_s
        return found

    def _whole(self, phase: Phase, seconds: float, batch_size: int, input_len: int) -> OpCost:
        is_prefill = phase.name == "prefill"
        return roofline.whole_step(
            self.model_config,
            _tensors(self.model_config),
            seconds,
            batch_size,
            batch_size * input_len if is_prefill else batch_size,
            input_len // 2 if is_prefill else phase.start,
            _CACHE_BYTES,
            self.arithmetic,
        )


def measure(
    config: Config,
    model_config: ModelConfig,
    options: BatchOptions,
    progress: Callable[[int, int], None],
) -> Rooflines:
    """Load the model, time the ops of all phases in `options`, and probe the machine with the same
    kernels.

    Args:
        progress: called with (timed phases, all phases).
    """
    from banyan.engine.core_process import open_op_timer
    from banyan.platform import open_platform

    config, _ = settle(config, open_platform(config.device.name).defaults(model_config))
    chunk = config.schedule.chunk_tokens
    combinations = product(options.batch_size, options.input_len, options.output_len)
    phases = {phase for sizes in combinations for phase in _phases(*sizes, chunk)}
    meter = open_op_timer(_just_enough(config, phases), model_config)
    is_rounded = config.model.rounds or not model_config.stores_floats
    is_exact = config.model.cpu_activations == "fp32"
    arithmetic = INT8 if is_rounded and not is_exact else FP32
    if not meter.is_recorded:
        print("The steps of this model are not recorded: no op can be timed alone")
        return Rooflines(probe(), model_config, chunk, {}, arithmetic, meter)
    costs: dict[Phase, list[OpCost]] = {}
    for phase in sorted(phases, key=lambda phase: phase.title):
        costs[phase] = roofline.merged(meter.measure(phase.rows, phase.start, phase.count))
        progress(len(costs), len(phases))
    machine = _machine(meter.threads, meter.peaks())
    return Rooflines(machine, model_config, chunk, costs, arithmetic, meter)


def _machine(threads: int, peaks: "Peaks") -> MachinePeaks:
    return MachinePeaks(
        threads,
        peaks.read_bytes_s,
        peaks.fp32_ops_s,
        peaks.int8_ops_s,
        peaks.bf16_ops_s,
        peaks.passing_s,
    )


def _phases(batch_size: int, input_len: int, output_len: int, chunk: int) -> list[Phase]:
    """The largest prefill step of a batch, and its decode step half way through the answer."""
    count = min(input_len, chunk) if chunk > 0 else input_len
    rows = min(batch_size, max(1, chunk // count)) if chunk > 0 else batch_size
    phases = [Phase("prefill", rows, 0, count)]
    if output_len > 1:
        phases.append(Phase("decode", batch_size, input_len + output_len // 2 - 1, 1))
    return phases


def _just_enough(config: Config, phases: set[Phase]) -> Config:
    """A cache that holds the largest of the steps, not a share of all memory."""
    page = config.cache.page_size
    most_rows = max(phase.rows for phase in phases)
    longest = max(phase.start + phase.count for phase in phases)
    total = most_rows * (-(-longest // page) + 1) * page
    return replace(
        config,
        cache=replace(config.cache, max_total_tokens=total + page, memory_fraction=0.0),
        schedule=replace(config.schedule, max_running=most_rows),
    )


def _tensors(model_config: ModelConfig) -> list[TensorInfo]:
    """Of every file of the checkpoint."""
    path = Path(model_config.path)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    found: list[TensorInfo] = []
    for file in files:
        kind = GGUFFile if file.suffix == ".gguf" else SafetensorsFile
        with kind.open(str(file)) as opened:
            found += opened.tensors.values()
    return found
