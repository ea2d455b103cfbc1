"""Flags that have no effect with, or without, other flags: a log line reports each of them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from banyan.config.devices import facts_of
from banyan.config.env import Environment
from banyan.config.flags.flag import SWITCH
from banyan.config.flags.table import GROUPS
from banyan.config.schema import REMOTE_INSTANCE, Config
from banyan.hub.sources import kind_of
from banyan.model_config.quantization import FLOAT8
from banyan.moe.rules import FUSED, LIMIT

_KEPT = ("local", "demo", "pypi")
"""Kinds of sources that need no hub."""


_HOST_CACHE = "hicache-ratio hicache-size hicache-io-backend hicache-mem-layout"


@dataclass(frozen=True)
class _Ignored:
    """Flags, separated by blanks, that have no effect while `holds` is true."""

    flags: str
    holds: Callable[[Config], bool]
    why: str


_RULES = (
    _Ignored(
        "log-requests-format log-requests-level",
        lambda c: not c.observe.log_requests,
        "no request is logged without --log-requests",
    ),
    _Ignored(
        "collect-tokens-histogram bucket-time-to-first-token bucket-inter-token-latency "
        "bucket-e2e-request-latency prompt-tokens-buckets generation-tokens-buckets "
        "tokenizer-metrics-allowed-custom-labels tokenizer-metrics-custom-labels-header "
        "metrics-compat enable-metrics-for-all-schedulers",
        lambda c: not c.observe.metrics,
        "there are no metrics without --enable-metrics",
    ),
    _Ignored(
        "tokenizer-metrics-custom-labels-header",
        lambda c: c.observe.metrics and not c.observe.label_names,
        "--tokenizer-metrics-allowed-custom-labels lists no label",
    ),
    _Ignored(
        "prompt-tokens-buckets generation-tokens-buckets",
        lambda c: c.observe.metrics and not c.observe.length_histograms,
        "lengths are not counted without --collect-tokens-histogram",
    ),
    _Ignored(
        "export-metrics-to-file-dir",
        lambda c: not c.observe.writes_records,
        "no records are written without --export-metrics-to-file",
    ),
    _Ignored(
        "oltp-traces-endpoint otlp-service-name",
        lambda c: not c.observe.traces,
        "nothing is traced without --enable-trace",
    ),
    _Ignored(
        "journal-bytes", lambda c: not c.observe.journal, "there is no journal without --journal"
    ),
    _Ignored(
        "schedule-low-priority-values-first priority-scheduling-preemption-threshold "
        "disable-priority-preemption priority-scheduling-max-wait",
        lambda c: not c.schedule.priorities,
        "there are no priorities without --enable-priority-scheduling",
    ),
    _Ignored(
        "abort-on-priority-when-disabled",
        lambda c: c.schedule.priorities,
        "priorities are on",
    ),
    _Ignored(
        "load-balance-method enable-dp-attention",
        lambda c: c.parallel.dp == 1,
        "there is one replica",
    ),
    _Ignored(
        "load-balance-method",
        lambda c: (
            c.parallel.dp > 1
            and c.parallel.load_balance == "follow_bootstrap_room"
            and not c.handoff.role
        ),
        "requests have no bootstrap room without --disaggregation-mode; replicas take turns",
    ),
    _Ignored(
        "pp-async-batch-depth enable-dynamic-chunking",
        lambda c: c.parallel.pp == 1,
        "there is one stage",
    ),
    _Ignored(
        "pp-async-batch-depth",
        lambda c: c.parallel.pp > 1 and c.schedule.depth == 1,
        "--disable-overlap-schedule keeps one step in flight",
    ),
    _Ignored(
        "enable-dp-lm-head",
        lambda c: not c.parallel.uses_dp_attention or c.parallel.dp == 1,
        "it needs --enable-dp-attention and several replicas",
    ),
    _Ignored(
        "enable-nsa-prefill-context-parallel nsa-prefill-cp-mode",
        lambda c: c.parallel.tp == 1,
        "there is one rank",
    ),
    _Ignored(
        "nsa-prefill-cp-mode",
        lambda c: c.parallel.tp > 1 and c.parallel.cp == 1 and not c.parallel.divides_prompts,
        "there is no context parallelism without --attn-cp-size or --enable-prefill-cp",
    ),
    _Ignored(
        "quantization-param-path",
        lambda c: c.cache.dtype not in FLOAT8,
        "scales are for --kv-cache-dtype fp8_e4m3 and fp8_e5m2",
    ),
    _Ignored(
        "disaggregation-transfer-backend disaggregation-bootstrap-port disaggregation-ib-device",
        lambda c: not c.handoff.role,
        "there is no disaggregation without --disaggregation-mode",
    ),
    _Ignored(
        "disaggregation-decode-enable-fake-auto num-reserved-decode-tokens "
        "disaggregation-decode-enable-offload-kvcache disaggregation-prefill-pp "
        "disaggregation-decode-polling-interval",
        lambda c: c.handoff.mode != "decode",
        "it is for --disaggregation-mode decode",
    ),
    _Ignored(
        "disaggregation-decode-tp disaggregation-decode-dp",
        lambda c: c.handoff.mode != "prefill",
        "it is for --disaggregation-mode prefill",
    ),
    _Ignored(
        "show-time-cost step-log-format",
        lambda c: not c.observe.step_log_interval,
        "there are no such lines with --decode-log-interval 0",
    ),
    _Ignored(
        "disaggregation-bootstrap-port",
        lambda c: c.handoff.mode == "decode",
        "requests carry the address of the prefill server",
    ),
    _Ignored(
        "radix-eviction-policy radix-eviction-policy-config",
        lambda c: c.cache.disable_radix,
        "no prefix is cached",
    ),
    _Ignored(
        "radix-eviction-policy",
        lambda c: c.cache.eviction == "priority" and not c.schedule.priorities,
        "without --enable-priority-scheduling it is the same as lru",
    ),
    _Ignored(
        "enable-weights-cpu-backup",
        lambda c: not c.device.memory_saver,
        "weights are not released without --enable-memory-saver",
    ),
    _Ignored(
        "ds-channel-config-path ds-heavy-channel-type ds-heavy-channel-num ds-heavy-token-num "
        "ds-sparse-decode-threshold",
        lambda c: not c.sparsity.is_enabled,
        "attention is dense without --enable-double-sparsity",
    ),
    _Ignored(
        "mooncake-ib-device",
        lambda c: "mooncake" not in (c.cache.store, c.handoff.role and c.handoff.transfer),
        "neither the store nor the transfers are Mooncake's",
    ),
    _Ignored(
        "disable-cuda-graph-padding",
        lambda c: facts_of(c).is_host and not c.device.shapes,
        "no step is padded here; with --cuda-graph-bs only steps of these sizes are replayed",
    ),
    _Ignored(
        "piecewise-cuda-graph-tokens piecewise-cuda-graph-max-tokens",
        lambda c: not c.device.captures_prompts,
        "steps with prompts are not captured without --enable-piecewise-cuda-graph",
    ),
    _Ignored(
        "offload-num-in-group",
        lambda c: c.device.offload_group < 1,
        "there are no groups without --offload-group-size",
    ),
    _Ignored(
        "offload-prefetch-step",
        lambda c: c.device.offload_group < 1 and not c.device.offload_gib,
        "all weights stay on the device without --cpu-offload-gb or --offload-group-size",
    ),
    _Ignored(
        _HOST_CACHE,
        lambda c: not c.cache.hierarchical,
        "there is no host tier without --enable-hierarchical-cache",
    ),
    _Ignored(
        "constrained-json-disable-any-whitespace constrained-json-whitespace-pattern "
        "grammar-timeout",
        lambda c: c.grammar.backend == "none",
        "--grammar-backend none turns structured output off",
    ),
    _Ignored(
        "chat-template completion-template tool-call-parser reasoning-parser tokenizer-path "
        "tokenizer-mode tokenizer-worker-num enable-tokenizer-batch-encode "
        "enable-dynamic-batch-tokenizer",
        lambda c: c.server.skip_tokenizer,
        "--skip-tokenizer-init loads no tokenizer",
    ),
    _Ignored(
        "dynamic-batch-tokenizer-batch-size dynamic-batch-tokenizer-batch-timeout",
        lambda c: not c.server.gathers_texts,
        "there are no tokenizer batches without --enable-dynamic-batch-tokenizer",
    ),
    _Ignored(
        "weight-loader-disable-mmap",
        lambda c: c.model.implementation == "transformers",
        "--model-impl transformers reads the files itself",
    ),
    _Ignored(
        "weight-loader-disable-mmap custom-weight-loader",
        lambda c: c.model.load_format == "dummy",
        "--load-format dummy reads no files",
    ),
    _Ignored(
        "remote-instance-weight-loader-seed-instance-ip "
        "remote-instance-weight-loader-seed-instance-service-port "
        "remote-instance-weight-loader-send-weights-group-ports "
        "remote-instance-weight-loader-backend",
        lambda c: c.model.load_format != REMOTE_INSTANCE,
        "weights are read from files without --load-format remote_instance",
    ),
    _Ignored(
        "remote-instance-weight-loader-send-weights-group-ports",
        lambda c: c.model.load_format == REMOTE_INSTANCE and c.model.seed_backend != "nccl",
        "with --remote-instance-weight-loader-backend transfer_engine the seed names its port",
    ),
    _Ignored(
        "preferred-sampling-params sampling-defaults",
        lambda c: c.model.is_embedding,
        "--is-embedding samples nothing",
    ),
    _Ignored(
        "enable-fp32-lm-head",
        lambda c: facts_of(c).is_host and c.model.cpu_activations == "fp32",
        "--cpu-activations fp32 computes everything in float32",
    ),
    _Ignored(
        "max-lora-rank lora-target-modules max-loras-per-batch max-loaded-loras "
        "lora-eviction-policy lora-memory-gib",
        lambda c: not c.lora.is_enabled and not c.lora.paths,
        "there are no adapters without --enable-lora or --lora-paths",
    ),
    _Ignored(
        "expert-distribution-recorder-buffer-size enable-expert-distribution-metrics",
        lambda c: not c.experts.recorder,
        "recording is off without --expert-distribution-recorder-mode",
    ),
    _Ignored(
        "moe-a2a-backend deepep-mode",
        lambda c: c.parallel.tp == 1 and c.experts.a2a != "none",
        "one rank has all experts",
    ),
    _Ignored(
        "deepep-mode",
        lambda c: c.experts.a2a == "none",
        "all rows go to all ranks without --moe-a2a-backend",
    ),
    _Ignored(
        "eplb-algorithm eplb-rebalance-num-iterations eplb-rebalance-layers-per-chunk "
        "eplb-min-rebalancing-utilization-threshold",
        lambda c: not c.experts.balances,
        "experts do not move without --enable-eplb",
    ),
    _Ignored(
        "install-model",
        lambda c: not c.model.source.startswith("pypi:"),
        "the model is not a pypi: package",
    ),
)


def _remarks(config: Config) -> Iterator[str]:
    """Lines about flags whose effect may surprise."""
    if config.server.logit_processors:
        yield (
            "--enable-custom-logit-processor lets requests name installed processors "
            "(entry points banyan.logit_processors); code in requests is never run"
        )

    experts = config.experts
    if experts.fuse_mode != Config().experts.fuse_mode and experts.a2a != FUSED:
        yield (
            "SGLANG_NPU_FUSED_MOE_MODE is set but has no effect: it chooses the "
            f"operator of --moe-a2a-backend {FUSED}"
        )
    is_idle = experts.a2a == "none" or experts.a2a_mode == "normal"
    if experts.a2a_tokens not in (0, Config().experts.a2a_tokens) and is_idle:
        yield (
            f"{LIMIT} is set but has no effect: it limits exchanges of "
            "--moe-a2a-backend deepep with --deepep-mode low_latency or auto"
        )


def flags_that_need_a_server(config: Config) -> Iterator[str]:
    """Lines about flags that only a server implements, for engines without one."""
    if config.observe.metrics:
        yield "--enable-metrics has no effect: /metrics needs a server"
    if config.observe.dumps:
        yield "--crash-dump-folder has no effect: crash dumps need a server"
    if config.model.dump_input and not config.model.injects:
        yield "--debug-tensor-dump-input-file has no effect: only a server's warm-up runs it"
    if config.observe.sigquit_handler:
        yield "--custom-sigquit-handler has no effect: it needs a server"
    if config.observe.recorder_bytes != Config().observe.recorder_bytes:
        yield "--flight-recorder-bytes has no effect: the flight recorder needs a server"


def ignored_flags(
    config: Config, origins: Mapping[str, str], environment: Environment
) -> Iterator[str]:
    """Return a line for each given flag that the other flags leave without effect."""
    kept = _Ignored(
        "revision download-dir",
        lambda c: kind_of(c.model.source, environment) in _KEPT,
        "the model is on this machine",
    )
    for rule in (*_RULES, kept):
        if rule.holds(config):
            given = [f for f in rule.flags.split() if _is_given(f, config, origins)]
            yield from (f"--{flag} is accepted but has no effect: {rule.why}" for flag in given)
    yield from _remarks(config)


def _is_given(name: str, config: Config, origins: Mapping[str, str]) -> bool:
    """Whether the flag was given with another value than its default."""
    flag = next(flag for _, flags in GROUPS for flag in flags if flag.name == name)
    part, _, field = flag.field.partition(".")
    value = getattr(getattr(config, part), field)
    if flag.kind == SWITCH:
        return value == flag.sets
    is_its_own = not isinstance(value, int) or flag.low <= value
    given = is_its_own and flag.field in origins
    return given and value != getattr(getattr(Config(), part), field)
