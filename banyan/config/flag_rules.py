"""Flags that do nothing beside other flags, or without them: each is told, none is silent."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from banyan.base.errors import ConfigError
from banyan.config.devices import facts_of
from banyan.config.env import Environment
from banyan.config.flags.device import ATTENTION
from banyan.config.flags.flag import SWITCH
from banyan.config.flags.table import GROUPS
from banyan.config.schema import Config
from banyan.hub.sources import kind_of
from banyan.model_config.kv_scales import FLOAT8
from banyan.moe.dispatch_rules import FUSED, LIMIT

_KEPT = ("local", "demo", "pypi")
"""Sources that no hub is asked about."""


_OF_THE_HOST = "hicache-ratio hicache-size hicache-io-backend hicache-mem-layout"


@dataclass(frozen=True)
class _Idle:
    """Flags that have no effect under a condition on the rest."""

    flags: str
    holds: Callable[[Config], bool]
    why: str


_RULES = (
    _Idle(
        "log-requests-format log-requests-level",
        lambda c: not c.observe.log_requests,
        "no request is logged without --log-requests",
    ),
    _Idle(
        "collect-tokens-histogram bucket-time-to-first-token bucket-inter-token-latency "
        "bucket-e2e-request-latency prompt-tokens-buckets generation-tokens-buckets "
        "tokenizer-metrics-allowed-custom-labels tokenizer-metrics-custom-labels-header "
        "metrics-compat",
        lambda c: not c.observe.metrics,
        "nothing is counted without --enable-metrics",
    ),
    _Idle(
        "tokenizer-metrics-custom-labels-header",
        lambda c: c.observe.metrics and not c.observe.label_names,
        "no label is listed with --tokenizer-metrics-allowed-custom-labels",
    ),
    _Idle(
        "prompt-tokens-buckets generation-tokens-buckets",
        lambda c: c.observe.metrics and not c.observe.length_histograms,
        "lengths are not counted without --collect-tokens-histogram",
    ),
    _Idle(
        "export-metrics-to-file-dir",
        lambda c: not c.observe.writes_records,
        "no records are written without --export-metrics-to-file",
    ),
    _Idle(
        "oltp-traces-endpoint otlp-service-name",
        lambda c: not c.observe.traces,
        "nothing is traced without --enable-trace",
    ),
    _Idle("journal-bytes", lambda c: not c.observe.journal, "there is no --journal"),
    _Idle(
        "schedule-low-priority-values-first priority-scheduling-preemption-threshold "
        "disable-priority-preemption priority-scheduling-max-wait",
        lambda c: not c.schedule.priorities,
        "priorities count under --enable-priority-scheduling only",
    ),
    _Idle(
        "abort-on-priority-when-disabled",
        lambda c: c.schedule.priorities,
        "priorities are on",
    ),
    _Idle(
        "load-balance-method enable-dp-attention",
        lambda c: c.parallel.dp == 1,
        "there is one replica",
    ),
    _Idle("pp-async-batch-depth", lambda c: c.parallel.pp == 1, "there is one stage"),
    _Idle(
        "pp-async-batch-depth",
        lambda c: c.parallel.pp > 1 and c.schedule.depth == 1,
        "one step is in flight under --disable-overlap-schedule",
    ),
    _Idle(
        "enable-dp-lm-head",
        lambda c: not c.parallel.uses_dp_attention or c.parallel.dp == 1,
        "there is no --enable-dp-attention with several replicas",
    ),
    _Idle(
        "enable-nsa-prefill-context-parallel nsa-prefill-cp-mode",
        lambda c: c.parallel.tp == 1,
        "there is one rank, and it computes all tokens",
    ),
    _Idle(
        "nsa-prefill-cp-mode",
        lambda c: c.parallel.tp > 1 and c.parallel.cp == 1 and not c.parallel.divides_prompts,
        "tokens are not divided without --attn-cp-size or --enable-prefill-cp",
    ),
    _Idle(
        "quantization-param-path",
        lambda c: c.cache.dtype not in FLOAT8,
        "scales are for --kv-cache-dtype fp8_e4m3 and fp8_e5m2",
    ),
    _Idle(
        "disaggregation-transfer-backend disaggregation-bootstrap-port",
        lambda c: not c.handoff.role,
        "nothing is handed over without --disaggregation-mode",
    ),
    _Idle(
        "disaggregation-bootstrap-port",
        lambda c: c.handoff.mode == "decode",
        "requests say where their prompts are",
    ),
    _Idle(
        "radix-eviction-policy radix-eviction-policy-config",
        lambda c: c.cache.disable_radix,
        "no prefix is cached",
    ),
    _Idle(
        "radix-eviction-policy",
        lambda c: c.cache.eviction == "priority" and not c.schedule.priorities,
        "all requests are equal without --enable-priority-scheduling, which leaves lru",
    ),
    _Idle(
        "cpu-offload-gb offload-group-size",
        lambda c: facts_of(c).is_host,
        "weights already lie in the memory of the host",
    ),
    _Idle(
        "offload-num-in-group",
        lambda c: c.device.offload_group < 1,
        "there are no groups without --offload-group-size",
    ),
    _Idle(
        "offload-prefetch-step",
        lambda c: c.device.offload_group < 1 and not c.device.offload_gib,
        "all weights stay on the device without --cpu-offload-gb or --offload-group-size",
    ),
    _Idle(
        _OF_THE_HOST,
        lambda c: facts_of(c).host_tier is None,
        "the cache lies in the memory of the host, where a second tier would be the same memory "
        "again, or on a device that has none; --max-total-tokens makes it larger",
    ),
    _Idle(
        _OF_THE_HOST,
        lambda c: facts_of(c).host_tier is not None and not c.cache.hierarchical,
        "pages stay on the device without --enable-hierarchical-cache",
    ),
    _Idle(
        "constrained-json-disable-any-whitespace constrained-json-whitespace-pattern "
        "grammar-timeout",
        lambda c: c.grammar.backend == "none",
        "nothing constrains answers",
    ),
    _Idle(
        "chat-template completion-template tool-call-parser reasoning-parser tokenizer-path "
        "tokenizer-worker-num enable-tokenizer-batch-encode enable-dynamic-batch-tokenizer",
        lambda c: c.server.skip_tokenizer,
        "there is no text under --skip-tokenizer-init",
    ),
    _Idle(
        "dynamic-batch-tokenizer-batch-size dynamic-batch-tokenizer-batch-timeout",
        lambda c: not c.server.gathers_texts,
        "texts are gathered under --enable-dynamic-batch-tokenizer only",
    ),
    _Idle(
        "weight-loader-disable-mmap",
        lambda c: c.model.implementation == "transformers",
        "with --model-impl transformers that library reads the files",
    ),
    _Idle(
        "weight-loader-disable-mmap custom-weight-loader",
        lambda c: c.model.load_format == "dummy",
        "with --load-format dummy no file is read",
    ),
    _Idle(
        "preferred-sampling-params sampling-defaults",
        lambda c: c.model.is_embedding,
        "nothing is sampled for embeddings",
    ),
    _Idle(
        "attention-backend",
        lambda c: (
            c.device.attention in ATTENTION[2:] and c.device.attention != facts_of(c).attention
        ),
        "the kernel of the device at hand attends; torch_native takes the one that is torch's",
    ),
    _Idle(
        "enable-fp32-lm-head",
        lambda c: c.model.cpu_activations == "fp32",
        "with --cpu-activations fp32 nothing is rounded",
    ),
    _Idle(
        "max-lora-rank lora-target-modules max-loras-per-batch max-loaded-loras "
        "lora-eviction-policy lora-memory-gib",
        lambda c: not c.lora.is_enabled and not c.lora.paths,
        "there are no adapters without --enable-lora or --lora-paths",
    ),
    _Idle(
        "expert-distribution-recorder-buffer-size enable-expert-distribution-metrics",
        lambda c: not c.experts.recorder,
        "nothing is recorded without --expert-distribution-recorder-mode",
    ),
    _Idle(
        "moe-a2a-backend deepep-mode",
        lambda c: c.parallel.tp == 1 and c.experts.a2a != "none",
        "one rank has all experts",
    ),
    _Idle(
        "deepep-mode",
        lambda c: c.experts.a2a == "none",
        "rows go to all ranks without --moe-a2a-backend",
    ),
    _Idle(
        "eplb-algorithm eplb-rebalance-num-iterations eplb-rebalance-layers-per-chunk "
        "eplb-min-rebalancing-utilization-threshold",
        lambda c: not c.experts.balances,
        "experts do not move without --enable-eplb",
    ),
    _Idle("install-model", lambda c: not c.model.source.startswith("pypi:"), "no pypi: is named"),
)


def _remarks(config: Config) -> Iterator[str]:
    """What a flag does otherwise than its users may expect."""
    if config.server.logit_processors:
        yield (
            "--enable-custom-logit-processor lets requests name processors that are installed "
            "(entry points banyan.logit_processors); code that a request brings is never run"
        )

    experts = config.experts
    if experts.fuse_mode != Config().experts.fuse_mode and experts.a2a != FUSED:
        yield (
            "SGLANG_NPU_FUSED_MOE_MODE is set but has no effect: it says which operator "
            f"--moe-a2a-backend {FUSED} is"
        )
    is_idle = experts.a2a == "none" or experts.a2a_mode == "normal"
    if experts.a2a_tokens not in (0, Config().experts.a2a_tokens) and is_idle:
        yield (
            f"{LIMIT} is set but has no effect: it bounds what travels at once under "
            "--moe-a2a-backend deepep with --deepep-mode low_latency or auto"
        )


def without_a_server(config: Config) -> Iterator[str]:
    """A line for what was asked for and only a server gives; for engines that run without one."""
    if config.observe.metrics:
        yield "--enable-metrics has no effect: figures are told at /metrics, and no server runs"
    if config.observe.dumps:
        yield "--crash-dump-folder has no effect: a server writes there, and none runs"
    if config.model.dump_input and not config.model.injects:
        yield "--debug-tensor-dump-input-file has no effect: a server's warm-up runs it"
    if config.observe.sigquit_handler:
        yield "--custom-sigquit-handler has no effect: a server hears it, and none runs"
    if config.observe.recorder_bytes != Config().observe.recorder_bytes:
        yield "--flight-recorder-bytes has no effect: a server holds the memory, and none runs"


def check_companions(
    config: Config, origins: Mapping[str, str], environment: Environment
) -> Iterator[str]:
    """A line for each flag that was given and has no effect beside the others.

    Raises:
        ConfigError: answers would differ from what a flag asks for.
    """
    if config.model.loader_functions and config.model.implementation == "transformers":
        raise ConfigError(
            "--custom-weight-loader cannot be combined with --model-impl transformers: that "
            "library reads the weights by itself",
            hint="leave --model-impl at auto, or change the weights beforehand",
        )
    kept = _Idle(
        "revision download-dir",
        lambda c: kind_of(c.model.source, environment) in _KEPT,
        "the model lies on this machine",
    )
    for rule in (*_RULES, kept):
        if rule.holds(config):
            given = [f for f in rule.flags.split() if _is_given(f, config, origins)]
            yield from (f"--{flag} is accepted but has no effect: {rule.why}" for flag in given)
    yield from _remarks(config)


def _is_given(name: str, config: Config, origins: Mapping[str, str]) -> bool:
    """Whether somebody gave the flag another value than it has anyway."""
    flag = next(flag for _, flags in GROUPS for flag in flags if flag.name == name)
    part, _, field = flag.field.partition(".")
    value = getattr(getattr(config, part), field)
    if flag.kind == SWITCH:
        return value == flag.sets
    is_its_own = not isinstance(value, int) or flag.low <= value
    given = is_its_own and flag.field in origins
    return given and value != getattr(getattr(Config(), part), field)
