"""`banyan bench batch` and `banyan bench throughput`: this program's own engine, without HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar, cast

from banyan.base.errors import BanyanError, ConfigError
from banyan.base.log import start_logging
from banyan.bench import batch as one_batch
from banyan.bench import report, roofline
from banyan.bench.datasets import load_prompts
from banyan.bench.options import BatchOptions, ThroughputOptions, split_options
from banyan.bench.probe import Machine, probe
from banyan.bench.serving import lexicon_of
from banyan.bench.throughput import run_throughput
from banyan.cli.bench import find_tokenizer
from banyan.compose import start_engine_thread
from banyan.config.card import ModelCard
from banyan.config.cli import parse
from banyan.config.env import read_environment
from banyan.config.resolve import prepare
from banyan.config.schema import Config
from banyan.formats.gguf import GGUFFile
from banyan.formats.mapped import TensorInfo
from banyan.formats.safetensors import SafetensorsFile
from banyan.messages.events import Ready
from banyan.messages.link import FrontLink, local_pair

T = TypeVar("T")

_WARM_OUTPUT_LEN = 32
_FP32_BYTES = 4


@dataclass(frozen=True)
class _Live:
    """An engine in a thread of this process."""

    link: FrontLink
    ready: Ready
    card: ModelCard
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
    machine = probe() if options.roofline else None
    asyncio.run(_batches(options, rest, machine))
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
    start_logging("bench", "error")
    with Engine(**_as_arguments(rest)) as engine:

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
        report.append_line(options.result_filename, keys)
    return 0


async def _batches(options: BatchOptions, rest: Sequence[str], machine: Machine | None) -> None:
    environment = read_environment()
    config = parse(rest, environment)
    start_logging("bench", config.observe.log_level if "--log-level" in rest else "warning")
    config, card = prepare(config, environment)
    async with _engine(config, card) as live:
        random = Random(options.seed)
        first = (options.batch_size[0], options.input_len[0])
        await _one(live, random, *first, min(options.output_len[0], _WARM_OUTPUT_LEN), "warm")
        if machine is not None:
            print(f"Machine: {machine}")
        for batch_size in options.batch_size:
            for input_len in options.input_len:
                for output_len in options.output_len:
                    await _report(options, live, random, machine, batch_size, input_len, output_len)


async def _report(
    options: BatchOptions,
    live: _Live,
    random: Random,
    machine: Machine | None,
    batch_size: int,
    input_len: int,
    output_len: int,
) -> None:
    """Run and show one combination."""
    name = f"{batch_size}x{input_len}x{output_len}"
    times = await _one(live, random, batch_size, input_len, output_len, name)
    keys = one_batch.results(options.run_name, batch_size, input_len, output_len, times)
    print(f"Batch size {batch_size}, input {input_len}, output {output_len}")
    for line in one_batch.lines(keys, times, options.log_decode_step):
        print(line)
    if machine is not None:
        keys |= {f"machine_{k}": v for k, v in machine.keys().items()}
        keys |= _show_roofline(live.card, machine, batch_size, input_len, output_len, keys)
    if options.result_filename:
        report.append_line(options.result_filename, keys)


def _show_roofline(
    card: ModelCard,
    machine: Machine,
    batch_size: int,
    input_len: int,
    output_len: int,
    keys: dict[str, object],
) -> dict[str, object]:
    """Both phases against their bounds; the fractions as keys."""
    tensors = _tensors(card)
    prefill_s, decode_s = keys["prefill_latency"], keys.get("median_decode_latency")
    assert isinstance(prefill_s, float)
    tokens = batch_size * input_len
    phases = [("prefill", prefill_s, tokens, input_len // 2)]
    if isinstance(decode_s, float):
        phases.append(("decode", decode_s, batch_size, input_len + output_len // 2))
    found: dict[str, object] = {}
    for phase, seconds, tokens, context in phases:
        cost = roofline.whole_step(
            card, tensors, seconds, batch_size, tokens, context, cache_bytes=_FP32_BYTES
        )
        rows = roofline.op_rows([cost], seconds, machine)
        print(roofline.table(f"Roofline of {phase}", rows, seconds))
        found[f"{phase}_fraction_of_bound"] = rows[0].fraction
    return found


async def _one(
    live: _Live, random: Random, batch_size: int, input_len: int, output_len: int, name: str
) -> one_batch.BatchTimes:
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
    ids = range(live.card.vocab_size)
    prompts = [random.choices(ids, k=input_len) for _ in range(batch_size)]
    return await _until(one_batch.run_batch(live.link, prompts, output_len, name), live.death)


@contextlib.asynccontextmanager
async def _engine(config: Config, card: ModelCard) -> AsyncIterator[_Live]:
    """An engine that is ready; stopped at the end of the block."""
    loop = asyncio.get_running_loop()
    death: asyncio.Future[str] = loop.create_future()

    def on_death(text: str) -> None:
        loop.call_soon_threadsafe(lambda: death.done() or death.set_result(text))

    front, back = local_pair()
    handle = start_engine_thread(config, card, back, on_death)
    try:
        ready = await _until(one_batch.wait_ready(front), death)
        yield _Live(front, ready, card, death)
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


def _tensors(card: ModelCard) -> list[TensorInfo]:
    """Of every file of the checkpoint."""
    path = Path(card.path)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    found: list[TensorInfo] = []
    for file in files:
        kind = GGUFFile if file.suffix == ".gguf" else SafetensorsFile
        with kind.open(str(file)) as opened:
            found += opened.tensors.values()
    return found


def _as_arguments(words: Sequence[str]) -> dict[str, object]:
    """Server flags as the keyword arguments of Engine."""
    found: dict[str, list[str]] = {}
    values = found.setdefault("model_path", [])
    for word in words:
        if word.startswith("--"):
            name, equals, text = word.removeprefix("--").partition("=")
            values = found.setdefault(name.replace("-", "_"), [])
            values += [text] if equals else []
        else:
            values.append(word)
    if not found["model_path"]:
        del found["model_path"]
    return {n: v if len(v) > 1 else v[0] if v else True for n, v in found.items()}
