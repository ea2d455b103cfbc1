"""`banyan simulate MODEL`: predict the performance of a layout of devices.

The real scheduler, cache and routing plan every step; a roofline of the model on the hardware gives
its duration.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from banyan.base.errors import ConfigError
from banyan.base.log import log_always, logger, start_logging
from banyan.bench.options import option, split_options
from banyan.config.cli import parse
from banyan.config.defaults import Defaults, settle
from banyan.config.env import read_environment
from banyan.config.prepare import prepare
from banyan.config.schema import Config
from banyan.sim.layout import SHEETS, Hardware, ParallelLayout, read_hardware, read_layout
from banyan.sim.study import Study, StudyQuestion, study
from banyan.sim.workload import Arrival, mooncake, poisson

log = logger(__name__)

_ABOUT = """Answers, on paper and in virtual time, how a model would serve a load on some layout of
devices. MODEL and every other flag are the server's (--tp-size, --pp-size, --dp-size,
--chunked-prefill-size, --schedule-policy …). Of a model folder only config.json is needed:
give --load-format dummy."""


@dataclass(frozen=True)
class SimulateOptions:
    """Options of `banyan simulate`."""

    hardware: str = option(
        "h100-sxm", f"{', '.join(SHEETS)}, or a JSON file with the figures of a device and its link"
    )
    layouts: tuple[str, ...] = option(
        (),
        "several to compare: tp=8 tp=4,dp=2 tp=8,dp=8,dp-attention tp=8,cp=4 prefill=2,decode=3; "
        "default: the layout of the flags",
    )
    requests: int = option(500, "how many")
    rate: float = option(4.0, "requests per second, Poisson")
    concurrency: int = option(0, "requests kept open in the place of a rate")
    input_len: int = option(1024, "mean tokens of a prompt, shared part included")
    output_len: int = option(256, "mean tokens of an answer")
    shared_len: int = option(0, "tokens at the beginning of a prompt that a family shares")
    families: int = option(1, "of prompts that share their beginning")
    trace: str = option("", "a trace in Mooncake's form (JSON lines) in the place of these")
    speed: float = option(1.0, "how many times faster than recorded the trace is played")
    context: int = option(1024, "positions before each row, for the step times on paper")
    weight_bits: float = option(0.0, "bits per weight, if the checkpoint does not say")
    peer_gb_s: float = option(
        0.0, "10^9 bytes a second from a prefill to a decode server; else as between devices"
    )
    host_us: float = option(0.0, "microseconds that planning a step takes on the host")
    seed: int = option(0, "same seed, same arrivals")


def simulate(argv: Sequence[str]) -> int:
    options, rest = split_options(SimulateOptions, argv, "banyan simulate", _ABOUT)
    _check(options)
    hardware = read_hardware(options.hardware)
    environment = read_environment()
    config = parse(rest, environment)
    start_logging("simulate", "warning")
    log_always(log, config.observe.notes)
    _refuse_what_is_not_simulated(config)
    config, model_config = prepare(config, environment)
    if model_config.has_states:
        raise ConfigError(
            "this model is not simulated: some of its layers keep a state, and no figure here "
            "counts those",
            hint="name another model",
        )
    parallel = config.parallel
    layouts = [read_layout(text) for text in options.layouts] or [
        ParallelLayout(
            parallel.tp, parallel.pp, parallel.dp, parallel.uses_dp_attention, cp=parallel.cp
        )
    ]
    config, _ = settle(config, _defaults(hardware))
    schedule = replace(config.schedule, max_queued=0, max_queued_tokens=0)
    question = StudyQuestion(
        config=replace(config, schedule=schedule),
        model_config=model_config,
        hardware=hardware,
        arrivals=list(_arrivals(options)),
        weight_bits=options.weight_bits,
        concurrency=options.concurrency,
        context=options.context,
        host_s=options.host_us / 1e6,
        peer_bytes_per_s=options.peer_gb_s * 1e9,
    )
    for line in _table([study(question, layout) for layout in layouts]):
        print(line)
    return 0


def _refuse_what_is_not_simulated(config: Config) -> None:
    """Raise ConfigError on features that the simulation does not model."""
    for flag, is_there in (
        ("--speculative-algorithm", bool(config.speculative.algorithm)),
        ("--hicache-storage-backend", bool(config.cache.store)),
        ("--lora-paths", bool(config.lora.paths)),
        ("--num-continuous-decode-steps", config.schedule.multi_step > 1),
    ):
        if is_there:
            raise ConfigError(f"{flag} is not simulated", hint="leave it out")


def _check(options: SimulateOptions) -> None:
    positive = {
        "--requests": options.requests,
        "--rate": options.rate,
        "--input-len": options.input_len,
        "--output-len": options.output_len,
        "--families": options.families,
        "--speed": options.speed,
        "--context": options.context,
    }
    for flag, value in positive.items():
        if not value > 0:
            raise ConfigError(f"{flag} must be above 0, not {value:g}")
    if not 0 <= options.shared_len <= options.input_len:
        raise ConfigError(
            f"--shared-len {options.shared_len} must lie between 0 and --input-len "
            f"{options.input_len}"
        )


def _arrivals(options: SimulateOptions) -> Iterator[Arrival]:
    if options.trace:
        return mooncake(options.trace, options.requests, options.speed)
    return poisson(
        options.rate,
        options.requests,
        options.input_len,
        options.output_len,
        shared_len=options.shared_len,
        families=options.families,
        seed=options.seed,
    )


def _defaults(hardware: Hardware) -> Defaults:
    """What an accelerator would suggest; the flags go before it."""
    return Defaults(
        device="simulated",
        dtypes=("bfloat16", "float16", "float32"),
        page_size=16,
        chunk_tokens=2048 if hardware.memory_gib < 48 else 8192,
        running_cap=512,
        free_share=0.85,
    )


def _table(studies: Sequence[Study]) -> Iterator[str]:
    rows = list(studies[0].decode_s)
    yield (
        f"{'layout':28}{'devices':>8}{'cache tokens':>14}"
        + "".join(f"{f'decode {n} ms':>14}" for n in rows)
        + f"{'prefill ms':>12}{'tokens/s':>10}{'ttft p50':>10}{'p99 ms':>10}"
        + f"{'itl p50':>9}{'p99 ms':>9}{'hits':>7}{'retracted':>10}"
    )
    for found in studies:
        yield _line(found)


def _line(found: Study) -> str:
    steps = "".join(f"{seconds * 1e3:14.2f}" for seconds in found.decode_s.values())
    head = f"{found.layout!s:28}{found.layout.devices:8}"
    if found.memory is None or found.report is None:
        return f"{head}{'–':>14}{steps}{found.prefill_s * 1e3:12.1f}  does not fit: {found.why}"
    report, layout = found.report, found.layout
    cached = found.memory.max_total_tokens * (layout.prefill + layout.decode or layout.dp)
    return (
        f"{head}{cached:14,}{steps}{found.prefill_s * 1e3:12.1f}{report.tokens_per_s:10.0f}"
        f"{report.ttft.p50 * 1e3:10.0f}{report.ttft.p99 * 1e3:10.0f}"
        f"{report.itl.p50 * 1e3:9.1f}{report.itl.p99 * 1e3:9.1f}"
        f"{report.hit_rate:7.0%}{report.retractions:10}"
    )
