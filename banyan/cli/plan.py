"""`banyan plan MODEL`: weights, cache, and what fits this machine, before anything is loaded. The
memory of quantised weights is estimated by restoring one weight of each kind with its method."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from banyan.base.errors import ConfigError, ModelError
from banyan.base.log import log_always, logger, printable, start_logging
from banyan.bench.options import option, split_options
from banyan.config.cli import parse
from banyan.config.defaults import settle
from banyan.config.devices import facts_of
from banyan.config.env import Environment, read_environment
from banyan.config.prepare import prepare
from banyan.config.schema import Config
from banyan.engine.core_spec import memory_of_adapters
from banyan.formats.gguf import kept_size
from banyan.formats.shards import size_of_weights
from banyan.hub.sources import fetch, kind_of
from banyan.kv_cache.sizing import MIB, MemoryPlan, plan_memory
from banyan.lora.adapter_files import named_adapters, read_adapter
from banyan.model_config.model_config import ModelConfig
from banyan.platform import open_platform
from banyan.sim.layout import ParallelLayout, Weights, cache_groups, weights_per_device
from banyan.sim.study import weight_bytes_of

log = logger(__name__)
GIB = 1 << 30
MOST_GIB, MOST_BITS = 1 << 30, 64
"""Larger than any machine and any format."""
TOO_LITTLE = 1
_SHORTEST = 1024
_HUB_KINDS = ("catalogue", "hub file", "hub", "modelscope")

_ROUNDED_TO = {"int8": "Q8_0", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}
"""--quantization -> storage type of rounded float weights."""

_ABOUT = """Shows the memory that a model takes on this machine, and how many requests of each
length fit, without loading it. The engine divides memory in the same way. MODEL and every other
flag are the server's (--tp-size, --kv-cache-dtype, --mem-fraction-static, --context-length …).
Nothing is downloaded: of a model that is not here, a folder with its config.json and --load-format
dummy is enough. Ends with 1 when what --context and --requests ask for does not fit."""

LIBRARY_BYTES = 256 << 20
"""Approximate memory of an engine process without weights: its libraries."""

_NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CACHE_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0}
_SCALE_BYTES = 4
"""Size of a scale of an int8 cache: one for each head and token, or for each latent vector."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of `banyan plan`."""

    context: int = option(0, "tokens of one request, prompt and answer")
    requests: int = option(0, "so many such requests at once")
    memory_gib: float = option(0.0, "free memory to plan with, in place of this machine's")
    weight_bits: float = option(0.0, "bits per weight, if the files do not say")


@dataclass(frozen=True)
class AvailableMemory:
    """Memory that the ranks of one machine may share.

    Attributes:
        total_bytes, free_bytes: of the device; of the machine where `is_host`.
        is_host: ranks and replicas share it.
    """

    total_bytes: int
    free_bytes: int
    is_host: bool


@dataclass(frozen=True)
class MemoryFit:
    """What one rank will hold.

    Attributes:
        weight_bytes: of this rank.
        activation_bytes: of the largest step, about; no room is kept for them.
        token_bytes: cache of one token, where every layer keeps it.
        memory: how the rest is divided.
    """

    weight_bytes: int
    activation_bytes: int
    token_bytes: float
    memory: MemoryPlan

    def at_once(self, context: int) -> int:
        """Requests of so many tokens, prompt and answer, that fit the cache together."""
        if context > self.memory.max_request_tokens:
            return 0
        size = self.memory.groups[0].page_tokens
        pages = -(-context // size)
        return min(self.memory.max_running, self.memory.max_total_tokens // (pages * size))


def plan(argv: Sequence[str]) -> int:
    options, rest = split_options(PlanOptions, argv, "banyan plan", _ABOUT)
    _check(options)
    environment = read_environment()
    config = parse(rest, environment)
    start_logging("plan", "warning")
    log_always(log, config.observe.notes)
    _refuse_what_is_not_here(config, environment)
    config, model_config = prepare(config, environment)
    platform = open_platform(config.device.name)
    config, _ = settle(config, platform.defaults(model_config))
    memory = platform.memory()
    available = AvailableMemory(memory.total_bytes, memory.free_bytes, platform.traits.is_host)
    if options.memory_gib:
        given = int(options.memory_gib * GIB)
        available = replace(available, total_bytes=given, free_bytes=given)
    per_weight = _weight_bytes(config, model_config, options, platform.traits.is_host)
    found = fit(config, model_config, available, per_weight)
    for line in _lines(config, model_config, available, found):
        print(line)
    return _verdict(options, found)


def _refuse_what_is_not_here(config: Config, environment: Environment) -> None:
    """Raise ModelError if the model would have to be downloaded."""
    try:
        fetch(replace(config.model, offline=True), environment)
    except ModelError as error:
        if config.model.offline or kind_of(config.model.source, environment) not in _HUB_KINDS:
            raise
        name = printable(config.model.source, 100)
        raise ModelError(
            f"{name} is not on this machine, and a plan fetches nothing",
            hint=f"run banyan pull {name} first, or name a folder that has its config.json, with "
            "--load-format dummy",
        ) from error


def _check(options: PlanOptions) -> None:
    for flag, value, most in (
        ("--context", options.context, math.inf),
        ("--requests", options.requests, math.inf),
        ("--memory-gib", options.memory_gib, MOST_GIB),
        ("--weight-bits", options.weight_bits, MOST_BITS),
    ):
        if math.isnan(value) or value < 0:
            raise ConfigError(f"{flag} must be a number that is not below 0, and is {value:g}")
        if value > most:
            raise ConfigError(f"{flag} must be at most {most}, and is {value:g}")
    if options.requests and not options.context:
        raise ConfigError(
            "--requests says how many, and nothing how long they are", hint="give --context too"
        )


def _weight_bytes(
    config: Config, model_config: ModelConfig, options: PlanOptions, is_host: bool
) -> float:
    """Bytes of one weight in memory."""
    if options.weight_bits:
        return options.weight_bits / 8
    rounds = f"--quantization {config.model.quantization}" if config.model.quantization else ""
    rounds = f"--torchao-config {config.model.torchao}" if config.model.torchao else rounds
    if rounds and model_config.quant is None and model_config.format != "gguf":
        raise ConfigError(
            f"how much a weight takes that {rounds} rounds is not counted here",
            hint="say it with --weight-bits, e.g. 8.5 for int8 and 4.5 for q4_0",
        )
    if model_config.format == "gguf" and not is_host:
        return 2.0 if config.model.activation_dtype != "float32" else 4.0
    if config.model.load_format == "dummy":
        return weight_bytes_of(model_config)
    if model_config.format == "gguf":
        size = kept_size(model_config.path)
    elif model_config.quant is None:
        size = size_of_weights(model_config.path)
    else:
        size = _of_quantised(config, model_config, is_host)
    return size / Weights.of(model_config).total


def _of_quantised(config: Config, model_config: ModelConfig, is_host: bool) -> int:
    """Bytes of a quantised folder's weights: the format decides which stay quantised."""
    from banyan.models.weights.quant.sizes import kept_size_of_folder  # imports torch

    # The kernels that multiply with them, and those that round, compute in fp32.
    has_kernels = is_host and config.model.activation_dtype == "float32"
    rounded_to = _ROUNDED_TO.get(config.model.quantization, "") if has_kernels else ""
    keeps_fp8 = has_kernels or facts_of(config).keeps_fp8
    keeps_fp4 = facts_of(config).keeps_fp8 and not is_host
    return kept_size_of_folder(model_config, keeps_fp8, rounded_to, keeps_fp4)


def _lines(
    config: Config, model_config: ModelConfig, available: AvailableMemory, found: MemoryFit
) -> Iterator[str]:
    memory, ranks = found.memory, config.parallel.tp * config.parallel.pp
    each = " on each rank" if ranks > 1 else ""
    replicas = f", {config.parallel.dp} replicas" if config.parallel.dp > 1 else ""
    kind = model_config.quant.method if model_config.quant is not None else model_config.dtype
    yield (
        f"{config.model.served_name}: {model_config.architecture}, {model_config.num_layers} "
        "layers, "
        f"{Weights.of(model_config).total / 1e6:,.0f} M weights in {kind}"
        + (f", {ranks} ranks" if ranks > 1 else "")
        + replicas
    )
    yield f"{'memory':<12} {_size(available.free_bytes)} free of {_size(available.total_bytes)}"
    yield f"{'weights':<12} {_size(found.weight_bytes)}{each}"
    yield f"{'activations':<12} {_size(found.activation_bytes)} in the largest step, about"
    yield (
        f"{'cache':<12} {_size(memory.cache_bytes)}{each}: {memory.max_total_tokens:,} tokens of "
        f"{found.token_bytes / 1024:,.1f} KiB"
    )
    if config.lora.is_enabled:
        most = _size(memory_of_adapters(config.lora, memory))
        adapter_configs = [read_adapter(place.path) for place in named_adapters(config.lora.paths)]
        files = _size(sum(found.size_bytes for found in adapter_configs))
        bound = f"at most {most}{each}"
        if not available.is_host:
            lora = config.lora
            bound = f"{lora.max_loaded} places of rank {lora.max_rank}, in addition to the weights"
        yield f"{'adapters':<12} {bound}; {len(adapter_configs)} at the start, {files} in files"
    yield f"{'requests':<12} at most {memory.max_running} at once"
    yield f"\n{'TOKENS EACH':>12} {'AT ONCE':>10} {'CACHE OF ONE':>14}"
    for context in _contexts(memory.max_request_tokens):
        one = _size(context * found.token_bytes)
        yield f"{context:>12,} {found.at_once(context):>10,} {one:>14}"


def _contexts(most: int) -> Iterator[int]:
    context = _SHORTEST
    while context < most:
        yield context
        context *= 2
    yield most


def _verdict(options: PlanOptions, found: MemoryFit) -> int:
    """Print whether the requests fit; returns the exit code."""
    if not options.context:
        return 0
    memory, wanted = found.memory, max(1, options.requests)
    at_once = found.at_once(options.context)
    asked = f"{wanted} × {options.context:,} tokens"
    if at_once >= wanted:
        print(f"\n{asked} fit: {at_once:,} would.")
        return 0
    if options.context > memory.max_request_tokens:
        print(f"\n{asked} do not fit: one request has {memory.max_request_tokens:,} at most.")
        return TOO_LITTLE
    needed = wanted * options.context * found.token_bytes
    print(
        f"\n{asked} do not fit: {at_once:,} would. They need {_size(needed)} of cache, and "
        f"{_size(memory.cache_bytes)} are there, and {memory.max_running} requests at once. Raise "
        "--mem-fraction-static or --max-running-requests, or take --kv-cache-dtype int8."
    )
    return TOO_LITTLE


def _size(count: float) -> str:
    return f"{count / GIB:,.2f} GiB" if count >= GIB else f"{count / MIB:,.1f} MiB"


def fit(
    config: Config, model_config: ModelConfig, room: AvailableMemory, weight_bytes: float
) -> MemoryFit:
    """How a model that `config` serves would lie in memory; `config` has nothing left open.

    Args:
        weight_bytes: of one weight, on average.

    Raises:
        CapacityError: it does not fit.
        ConfigError: layers keep a state, which is not counted here.
    """
    if model_config.has_states:
        raise ConfigError(
            "this model is not planned: some of its layers keep a state, which is not counted here",
            hint="start it: the log has the memory that is left for the cache",
        )
    parallel = config.parallel
    layout = ParallelLayout(
        parallel.tp, parallel.pp, parallel.dp, parallel.uses_dp_attention, cp=parallel.cp
    )
    weights = round(weights_per_device(model_config, layout, weight_bytes))
    sharers = parallel.local_world * parallel.local_replicas if room.is_host else 1
    per_number = cache_bytes_of(config, model_config, room.is_host)
    groups = cache_groups(config, model_config, layout, per_number)
    held = LIBRARY_BYTES + weights
    memory = plan_memory(
        config.cache,
        config.schedule,
        context_length=config.model.context_length or model_config.context_length,
        groups=groups,
        process_bytes=held,
        total_bytes=room.total_bytes // sharers,
        free_bytes=max(0, room.free_bytes // sharers - held),
    )
    token = sum(group.page_bytes for group in groups) / config.cache.page_size
    return MemoryFit(weights, _activations(config, model_config), token, memory)


def cache_bytes_of(config: Config, model_config: ModelConfig, is_host: bool) -> float:
    """Bytes of one number in the cache, scales shared out."""
    kind = config.cache.dtype
    if kind == "int8":
        vectors = 2 if model_config.latent is not None else 2 * model_config.num_kv_heads
        return 1.0 + _SCALE_BYTES * vectors / model_config.kept_per_token
    if kind in _CACHE_BYTES:
        return _CACHE_BYTES[kind]
    plain = _NUMBER_BYTES[config.model.activation_dtype]
    rounds = is_host and plain == 4 and config.model.cpu_activations != "fp32"
    return 2.0 if rounds else float(plain)


def _activations(config: Config, model_config: ModelConfig) -> int:
    """Of one step with a full chunk: what a layer keeps at a time, and the logits of every row."""
    chunk = max(config.schedule.chunk_tokens, 1)
    inner = max(model_config.inner_of(layer) for layer in range(model_config.num_layers))
    width = (
        4 * model_config.hidden_size
        + 3 * inner
        + 2 * max(model_config.num_heads, model_config.window_heads) * model_config.head_dim
    )
    logits = config.schedule.running_cap * model_config.vocab_size * 4
    return chunk * width * _NUMBER_BYTES[config.model.activation_dtype] + logits
