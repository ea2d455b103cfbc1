"""`banyan bench batch` and `banyan bench throughput`: this program's own engine, without HTTP."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, TypeVar, cast

from banyan.base.errors import BanyanError, ConfigError
from banyan.base.log import log_always, logger, start_logging
from banyan.bench import offline, report, roofline
from banyan.bench.datasets import Prompt, load_prompts
from banyan.bench.offline import run_throughput
from banyan.bench.options import BatchOptions, ThroughputOptions, split_options
from banyan.bench.roofline import FP32, INT8, MachinePeaks, OpCost, probe
from banyan.bench.serving import lexicon_of
from banyan.cli.bench import find_tokenizer, keep, progress_bar, say
from banyan.config.cli import parse
from banyan.config.defaults import settle
from banyan.config.env import read_environment
from banyan.config.prepare import prepare
from banyan.config.rules.ignored import flags_that_need_a_server
from banyan.config.schema import Config
from banyan.formats.gguf import GGUFFile
from banyan.formats.mapped import TensorInfo
from banyan.formats.safetensors import SafetensorsFile
from banyan.messages.events import Ready
from banyan.messages.transport import FrontLink, local_pair
from banyan.model_config.model_config import ModelConfig
from banyan.server.processes import start_engine_thread

if TYPE_CHECKING:
    from banyan.llm import Engine
    from banyan.ops.api import Peaks
    from banyan.runner.profiler import OpTimer

T = TypeVar("T")
log = logger(__name__)
_WARM_OUTPUT_LEN = 32
_WATCH_S = 0.5
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


@dataclass(frozen=True)
class _Live:
    """An engine in a thread of this process."""

    link: FrontLink
    ready: Ready
    model_config: ModelConfig
    death: "asyncio.Future[str]"


def batch(argv: Sequence[str]) -> int:
    """`banyan bench batch`: every combination of the sizes and lengths in turn."""
    options, rest = split_options(
        BatchOptions,
        argv,
        "banyan bench batch",
        "One static batch in this program. Every other flag is the server's; see banyan serve "
        "--help.",
    )
    if min(options.batch_size + options.input_len + options.output_len) < 1:
        raise ConfigError("--batch-size, --input-len and --output-len must be at least 1")
    environment = read_environment()
    config = parse(rest, environment)
    is_level_given = any(word.startswith("--log") for word in rest)
    start_logging("bench", config.observe.log_level if is_level_given else "warning")
    log_always(log, (*config.observe.notes, *flags_that_need_a_server(config)))
    config, model_config = prepare(config, environment)
    if options.roofline:
        say("timing the ops of each kind of step …")
    show = progress_bar("kinds of steps")
    rooflines = measure(config, model_config, options, show) if options.roofline else None
    say("loading the model …")
    asyncio.run(_batches(options, config, model_config, rooflines))
    return 0


def throughput(argv: Sequence[str]) -> int:
    """`banyan bench throughput`."""
    options, rest = split_options(
        ThroughputOptions,
        argv,
        "banyan bench throughput",
        "A whole data set through this program's own engine. Every other flag is the server's.",
    )
    from banyan.llm import Engine

    config = parse(rest, read_environment())
    tokenizer = find_tokenizer(options.tokenizer or config.model.source)
    prompts = load_prompts(options, lexicon_of(options, tokenizer))
    if any(prompt.images for prompt in prompts):
        raise ConfigError("--dataset-name image sends pictures", hint="use banyan bench serving")
    start_logging("bench", "error")
    say("loading the model …")
    with Engine.from_words(["--log-level=error", *rest]) as engine, _watched(engine, prompts):

        def generate(
            ids: list[list[int]], sampling: list[dict[str, object]]
        ) -> list[dict[str, object]]:
            answers = engine.generate(input_ids=ids, sampling_params=sampling)
            return cast(list[dict[str, object]], answers)

        keys = run_throughput(
            generate,
            prompts,
            ignore_eos=not options.disable_ignore_eos,
            warm_up=not options.skip_warmup,
        )
    print(report.throughput_table(keys))
    if options.result_filename:
        keep(options.result_filename, keys)
    return 0


@contextlib.contextmanager
def _watched(engine: "Engine", prompts: Sequence[Prompt]) -> Iterator[None]:
    """Show how far the engine is, of the longest that the answers to `prompts` can be."""
    show, most = progress_bar("output tokens"), sum(prompt.output_len for prompt in prompts)
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_WATCH_S):
            show(min(engine.stats().output_tokens, most), most)

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        show(most, most)


async def _batches(
    options: BatchOptions, config: Config, model_config: ModelConfig, rooflines: Rooflines | None
) -> None:
    async with _engine(config, model_config) as live:
        random = Random(options.seed)
        first = (options.batch_size[0], options.input_len[0])
        await _one(live, random, *first, min(options.output_len[0], _WARM_OUTPUT_LEN), "warm")
        if rooflines is not None:
            print(f"MachinePeaks: {rooflines.machine}")
        for batch_size in options.batch_size:
            for input_len in options.input_len:
                for output_len in options.output_len:
                    await _report(
                        options, live, random, rooflines, batch_size, input_len, output_len
                    )


async def _report(
    options: BatchOptions,
    live: _Live,
    random: Random,
    rooflines: Rooflines | None,
    batch_size: int,
    input_len: int,
    output_len: int,
) -> None:
    """Run and show one combination."""
    name = f"{batch_size}x{input_len}x{output_len}"
    say(f"batch {name} …")
    times = await _one(live, random, batch_size, input_len, output_len, name)
    keys = offline.results(options.run_name, batch_size, input_len, output_len, times)
    print(f"Batch size {batch_size}, input {input_len}, output {output_len}")
    for line in offline.lines(keys, times, options.log_decode_step):
        print(line)
    if rooflines is not None:
        keys |= {f"machine_{k}": v for k, v in rooflines.machine.keys().items()}
        keys |= rooflines.show(batch_size, input_len, output_len, keys)
    if options.result_filename:
        keep(options.result_filename, keys)


async def _one(
    live: _Live, random: Random, batch_size: int, input_len: int, output_len: int, name: str
) -> offline.BatchTimes:
    if input_len + output_len > live.ready.max_request_tokens:
        raise ConfigError(
            f"{input_len} + {output_len} tokens are more than the {live.ready.max_request_tokens} "
            "that one request may have",
            hint="lower --input-len or raise --context-length",
        )
    if batch_size > live.ready.max_running:
        raise ConfigError(
            f"--batch-size {batch_size} is more than the {live.ready.max_running} requests that "
            "run at once",
            hint="raise --max-running-requests",
        )
    # Fresh random prompts, so that no prefix of an earlier batch is in the cache.
    ids = range(live.model_config.vocab_size)
    prompts = [random.choices(ids, k=input_len) for _ in range(batch_size)]
    show = progress_bar("tokens of each sequence")
    work = offline.run_batch(live.link, prompts, output_len, name, show)
    return await _until(work, live.death)


@contextlib.asynccontextmanager
async def _engine(config: Config, model_config: ModelConfig) -> AsyncIterator[_Live]:
    """An engine that is ready; stopped at the end of the block."""
    loop = asyncio.get_running_loop()
    death: asyncio.Future[str] = loop.create_future()

    def on_death(text: str) -> None:
        loop.call_soon_threadsafe(lambda: death.done() or death.set_result(text))

    front, back = local_pair()
    handle = start_engine_thread(config, model_config, back, on_death)
    try:
        ready = await _until(offline.wait_ready(front), death)
        yield _Live(front, ready, model_config, death)
    finally:
        await asyncio.to_thread(handle.stop)
        front.close()


async def _until(work: Coroutine[object, object, T], death: "asyncio.Future[str]") -> T:
    """The outcome of `work`, unless the engine dies first."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    raise BanyanError(death.result())


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
