"""Features that cannot be combined: one table, and one sentence for all of them.

A feature is a function of the flags and the model. It returns the flag as the user gave it, or the
property of the model; "" while the feature is off.
"""

from collections.abc import Callable
from dataclasses import dataclass

from banyan.base.errors import ConfigError
from banyan.config.env import Environment
from banyan.config.flags.device import ATTENTION
from banyan.config.schema import CacheConfig, Config
from banyan.config.speculation import branching_flag
from banyan.model_config.model_config import ModelConfig

Feature = Callable[[Config, ModelConfig | None], str]


@dataclass(frozen=True)
class Conflict:
    """Two features that exclude each other.

    Attributes:
        why: reason for people; "" where the names say enough.
        hint: what to do instead.
    """

    first: Feature
    second: Feature
    why: str
    hint: str

    def error(self, config: Config, model_config: ModelConfig | None) -> ConfigError | None:
        """The error if both features are on; None otherwise."""
        first = self.first(config, model_config)
        second = first and self.second(config, model_config)
        if not second:
            return None
        why = f": {self.why}" if self.why else ""
        return ConfigError(f"{first} cannot be combined with {second}{why}", hint=self.hint)


def refuse_conflicts(
    config: Config, model_config: ModelConfig | None, environment: Environment
) -> Config:
    """Raise ConfigError for the first conflict of the table.

    Args:
        model_config: None before the model is fetched; properties of the model then count as off.
    """
    for conflict in CONFLICTS:
        if (error := conflict.error(config, model_config)) is not None:
            raise error
    return config


def reason_for_one_step(config: Config, model_config: ModelConfig) -> str:
    """The feature that forbids several decode steps in one plan, with its reason; "" for none."""
    for conflict in CONFLICTS:
        if conflict.first is multi_step and (other := conflict.second(config, model_config)):
            return f"{other}: {conflict.why}"
    return ""


def _flag(name: str, value: Callable[[Config], object]) -> Feature:
    """The flag with its value while the value is not false, 0 or ""; switches have no value."""

    def feature(config: Config, _: ModelConfig | None) -> str:
        given = value(config)
        if not given:
            return ""
        shown = f"{given:g}" if isinstance(given, float) else given
        return f"--{name}" if isinstance(given, bool) else f"--{name} {shown}"

    return feature


def _model(name: str, value: Callable[[ModelConfig], bool]) -> Feature:
    """A property of the model."""
    return lambda _, model_config: name if model_config and value(model_config) else ""


# How the model is loaded and run.
transformers = _flag("model-impl transformers", lambda c: c.model.implementation == "transformers")
dummy_weights = _flag("load-format dummy", lambda c: c.model.load_format == "dummy")
embedding_flag = _flag("is-embedding", lambda c: c.model.is_embedding)
weight_loader = _flag("custom-weight-loader", lambda c: bool(c.model.loader_functions))
forward_hooks = _flag("forward-hooks", lambda c: bool(c.model.hooks))
tensor_dump = _flag("debug-tensor-dump-output-folder", lambda c: bool(c.model.dump_folder))
tensor_injection = _flag("debug-tensor-dump-inject", lambda c: c.model.injects)
dump_input = _flag("debug-tensor-dump-input-file", lambda c: bool(c.model.dump_input))
no_warmup = _flag("skip-server-warmup", lambda c: c.server.skip_warmup)
torchao = _flag("torchao-config", lambda c: c.model.torchao)
quantization = _flag(
    "quantization",
    lambda c: "" if c.model.quantization in ("unquant", "gguf") else c.model.quantization,
)
deterministic = _flag("enable-deterministic-inference", lambda c: c.device.is_deterministic)
sparsity = _flag("enable-double-sparsity", lambda c: c.sparsity.is_enabled)
saver_without_draft = _flag(
    "enable-memory-saver", lambda c: c.device.memory_saver and not c.device.draft_backup
)
offload_size = _flag("cpu-offload-gb", lambda c: c.device.offload_gib)
offload_groups = _flag("offload-group-size", lambda c: max(0, c.device.offload_group))
lora = _flag("enable-lora", lambda c: c.lora.is_enabled or bool(c.lora.paths))
states = _model("a model with recurrent states", lambda m: m.has_states)
embedding_model = _model("an embedding model", lambda m: m.pooling is not None)
encoder = _model("an encoder", lambda m: m.is_encoder)


def watched_layers(config: Config, _: ModelConfig | None) -> str:
    return "--forward-hooks or --debug-tensor-dump-*" if config.model.is_watched else ""


def plugin_attention(config: Config, _: ModelConfig | None) -> str:
    attention = config.device.attention
    return "" if attention in ("", *ATTENTION) else f"--attention-backend {attention}"


# KV cache and structured output.
no_prefix_cache = _flag("disable-radix-cache", lambda c: c.cache.disable_radix)
hierarchical_cache = _flag("enable-hierarchical-cache", lambda c: c.cache.hierarchical)
storage = _flag("hicache-storage-backend", lambda c: c.cache.store)
window_ratio = _flag("swa-full-tokens-ratio", lambda c: c.cache.window_ratio > 0)
window_mix = _flag("hybrid-kvcache-ratio", lambda c: c.cache.window_mix >= 0)
whole_windows = _flag("disable-hybrid-swa-memory", lambda c: c.cache.keeps_windows)
json_pattern = _flag("constrained-json-whitespace-pattern", lambda c: bool(c.grammar.whitespace))
compact_json = _flag("constrained-json-disable-any-whitespace", lambda c: c.grammar.compact)


def state_count(config: Config, model_config: ModelConfig | None) -> str:
    is_on = config.cache.states and model_config is not None and model_config.has_states
    return f"--max-mamba-cache-size {config.cache.states}" if is_on else ""


def state_ratio(config: Config, _: ModelConfig | None) -> str:
    ratio = config.cache.state_ratio
    return "" if ratio == CacheConfig().state_ratio else f"--mamba-full-memory-ratio {ratio:g}"


# Scheduling and speculative decoding.
multi_step = _flag(
    "num-continuous-decode-steps",
    lambda c: c.schedule.multi_step if c.schedule.multi_step > 1 else 0,
)
drafting = _flag("speculative-algorithm", lambda c: c.speculative.algorithm)
draft_path = _flag("speculative-draft-model-path", lambda c: bool(c.speculative.draft_source))
block_size = _flag("speculative-dflash-block-size", lambda c: c.speculative.block_size)


def relaxed(config: Config, _: ModelConfig | None) -> str:
    speculative = config.speculative
    is_on = (speculative.accept_single, speculative.accept_total) != (1.0, 1.0)
    return "--speculative-accept-threshold-*" if is_on else ""


def draft_tree(config: Config, _: ModelConfig | None) -> str:
    return branching_flag(config.speculative)


def ngram_branches(config: Config, _: ModelConfig | None) -> str:
    breadth = config.speculative.min_breadth
    return f"--speculative-ngram-min-bfs-breadth {breadth}" if breadth > 1 else ""


def model_branches(config: Config, _: ModelConfig | None) -> str:
    topk = config.speculative.eagle_topk
    return f"--speculative-eagle-topk {topk}" if topk > 1 else ""


def _drafter(holds: Callable[[Config], bool]) -> Feature:
    """--speculative-algorithm while it is one of a kind."""
    return _flag("speculative-algorithm", lambda c: c.speculative.algorithm if holds(c) else "")


dflash = _drafter(lambda c: c.speculative.is_block)
not_dflash = _drafter(lambda c: not c.speculative.is_block)
not_ngram = _drafter(lambda c: c.speculative.algorithm != "NGRAM")
mtp = _drafter(lambda c: c.speculative.is_mtp)
draft_model = _drafter(lambda c: c.speculative.is_model)
no_draft_model = _drafter(lambda c: not c.speculative.is_model)
separate_draft_model = _drafter(lambda c: c.speculative.is_model and not c.speculative.is_mtp)


def drafting_with_shared_head(config: Config, _: ModelConfig | None) -> str:
    speculative = config.speculative
    if not speculative.borrows_head or config.parallel.replicates_lm_head:
        return ""
    return f"--speculative-algorithm {speculative.algorithm} without --enable-dp-lm-head"


# Parallelism.
dp_attention = _flag(
    "enable-dp-attention", lambda c: c.parallel.uses_dp_attention and c.parallel.dp > 1
)
replicas = _flag("data-parallel-size", lambda c: c.parallel.dp * (c.parallel.dp > 1))
separate_replicas = _flag(
    "data-parallel-size",
    lambda c: 0 if c.parallel.uses_dp_attention or c.parallel.dp == 1 else c.parallel.dp,
)
pipeline = _flag("pipeline-parallel-size", lambda c: c.parallel.pp * (c.parallel.pp > 1))
context_parallel = _flag("attn-cp-size", lambda c: c.parallel.cp * (c.parallel.cp > 1))
ray = _flag("use-ray", lambda c: c.parallel.by_ray)
node_rank = _flag("node-rank", lambda c: c.parallel.node)


def several_ranks(config: Config, _: ModelConfig | None) -> str:
    return "several ranks" if config.parallel.world > 1 else ""


def several_nodes(config: Config, _: ModelConfig | None) -> str:
    return config.parallel.nodes_flag if config.parallel.nodes > 1 else ""


# Experts.
expert_exchange = _flag(
    "moe-a2a-backend", lambda c: "" if c.experts.a2a == "none" else c.experts.a2a
)
recorder = _flag("expert-distribution-recorder-mode", lambda c: bool(c.experts.recorder))
returned_experts = _flag("enable-return-routed-experts", lambda c: c.experts.are_returned)
eplb = _flag("enable-eplb", lambda c: c.experts.balances)
expert_copies = _flag("ep-num-redundant-experts", lambda c: c.experts.redundant)
expert_location = _flag("init-expert-location", lambda c: c.experts.location != "trivial")
expert_dispatch = _flag("ep-dispatch-algorithm", lambda c: c.experts.dispatch)
fake_dispatch = _flag("ep-dispatch-algorithm fake", lambda c: c.experts.dispatch == "fake")

disaggregation = _flag("disaggregation-mode", lambda c: c.handoff.role)

_LEAVE_ONE = "leave one of them out"
_LEAVE_IT = "leave it out"
_GIVE_ONE = "give only one of them"
_NATIVE = "leave --model-impl at auto"
_TP_ALONE = "use --tensor-parallel-size alone"
_NO_CP = "leave --attn-cp-size out: each rank would see only its part of the tokens"
_ONE_MACHINE = "start all ranks on one machine"
_ROUTER = "start a server on each machine, with a router in front"

CONFLICTS = (
    # The transformers library runs the model.
    Conflict(embedding_flag, transformers, "", _NATIVE),
    Conflict(
        weight_loader,
        transformers,
        "the library reads the weights itself",
        "leave --model-impl at auto, or change the weights beforehand",
    ),
    Conflict(watched_layers, transformers, "they need the modules of this server", _NATIVE),
    Conflict(
        deterministic,
        transformers,
        "its results may depend on the other requests of a batch",
        _NATIVE,
    ),
    Conflict(torchao, transformers, "the library reads the weights itself", _LEAVE_ONE),
    Conflict(lora, transformers, "", _NATIVE),
    Conflict(expert_exchange, transformers, "", _NATIVE),
    Conflict(recorder, transformers, "", _NATIVE),
    Conflict(returned_experts, transformers, "", _NATIVE),
    Conflict(eplb, transformers, "", _NATIVE),
    Conflict(context_parallel, transformers, "", _NATIVE),
    Conflict(dp_attention, transformers, "", _NATIVE),
    Conflict(
        mtp,
        transformers,
        "",
        "use --speculative-algorithm STANDALONE with a small model, or NGRAM",
    ),
    # Double sparsity.
    Conflict(sparsity, transformers, "", _NATIVE),
    Conflict(sparsity, several_ranks, "each rank has other heads", "use --data-parallel-size"),
    Conflict(sparsity, drafting, "rows with drafts attend to all tokens", _LEAVE_ONE),
    Conflict(sparsity, embedding_model, "it decodes nothing", _LEAVE_IT),
    Conflict(sparsity, plugin_attention, "both replace the attention", _LEAVE_ONE),
    # Weights.
    Conflict(torchao, quantization, "both set the quantization of weights", _GIVE_ONE),
    Conflict(torchao, dummy_weights, "random weights are not quantized", _LEAVE_ONE),
    Conflict(offload_size, offload_groups, "both choose the layers in host memory", _GIVE_ONE),
    Conflict(dump_input, no_warmup, "the warm-up runs the prompt of the file", _LEAVE_ONE),
    # KV cache and structured output.
    Conflict(hierarchical_cache, no_prefix_cache, "there are no prefixes to keep", _LEAVE_ONE),
    Conflict(window_ratio, window_mix, "both size sliding-window layers", _GIVE_ONE),
    Conflict(window_ratio, whole_windows, "both size sliding-window layers", _GIVE_ONE),
    Conflict(window_mix, whole_windows, "both size sliding-window layers", _GIVE_ONE),
    Conflict(state_count, state_ratio, "both set the number of states", _GIVE_ONE),
    Conflict(json_pattern, compact_json, "both set the white space of JSON", _GIVE_ONE),
    # Several machines.
    Conflict(ray, node_rank, "Ray starts the other nodes", "start only the first node"),
    Conflict(replicas, ray, "", _ROUTER),
    Conflict(
        separate_replicas,
        several_nodes,
        "",
        f"{_ROUTER}; or share the experts by --enable-dp-attention",
    ),
    Conflict(expert_location, several_nodes, "", _ONE_MACHINE),
    Conflict(eplb, several_nodes, "", _ONE_MACHINE),
    Conflict(
        separate_draft_model,
        several_nodes,
        "draft models are loaded on one machine only",
        "use --speculative-algorithm NGRAM, which needs no model",
    ),
    # DP attention.
    Conflict(dp_attention, pipeline, "", _TP_ALONE),
    Conflict(
        dp_attention,
        drafting_with_shared_head,
        "each replica drafts by itself with the whole lm_head",
        "add --enable-dp-lm-head",
    ),
    Conflict(dp_attention, embedding_model, "", "use --data-parallel-size alone"),
    Conflict(fake_dispatch, dp_attention, "", "use --data-parallel-size alone"),
    # Context parallelism.
    Conflict(context_parallel, dp_attention, "", _LEAVE_ONE),
    Conflict(context_parallel, pipeline, "", _TP_ALONE),
    Conflict(context_parallel, forward_hooks, "", _NO_CP),
    Conflict(context_parallel, tensor_dump, "", _NO_CP),
    Conflict(context_parallel, tensor_injection, "", _NO_CP),
    Conflict(context_parallel, storage, "prefixes are cached in memory", _LEAVE_ONE),
    Conflict(
        context_parallel, draft_tree, "draft trees are not divided between ranks", "leave it at 1"
    ),
    Conflict(
        context_parallel,
        dflash,
        "draft blocks are not divided between ranks",
        "use EAGLE3 or NGRAM",
    ),
    Conflict(context_parallel, recorder, "", _TP_ALONE),
    Conflict(context_parallel, returned_experts, "", _TP_ALONE),
    Conflict(context_parallel, eplb, "", _TP_ALONE),
    Conflict(context_parallel, expert_copies, "", _TP_ALONE),
    Conflict(context_parallel, expert_dispatch, "", _TP_ALONE),
    Conflict(context_parallel, expert_location, "", _TP_ALONE),
    Conflict(
        context_parallel,
        embedding_model,
        "prompts to embed are not divided between ranks",
        _TP_ALONE,
    ),
    Conflict(
        context_parallel,
        states,
        "a state reads the tokens one after another",
        "use --tensor-parallel-size, which shards states",
    ),
    # Recurrent states.
    Conflict(draft_tree, states, "a state cannot branch", _LEAVE_IT),
    Conflict(storage, states, "storage keeps KV of positions, and no states", _LEAVE_IT),
    Conflict(dp_attention, states, "state layers take the rows of one replica", _LEAVE_IT),
    Conflict(
        pipeline, states, "stages do not get the locations of states", "use --tensor-parallel-size"
    ),
    # Speculative decoding.
    Conflict(drafting, embedding_model, "it generates no tokens", _LEAVE_IT),
    Conflict(drafting, pipeline, "stages do not verify drafts", "use --tensor-parallel-size"),
    Conflict(ngram_branches, not_ngram, "only NGRAM reads it", _LEAVE_IT),
    Conflict(
        block_size,
        not_dflash,
        "only DFLASH reads it",
        "leave it out; --speculative-num-draft-tokens sets how much is verified at once",
    ),
    Conflict(
        model_branches,
        no_draft_model,
        "only draft models read it",
        "leave it out; --speculative-ngram-min-bfs-breadth lets NGRAM branch",
    ),
    Conflict(dflash, plugin_attention, "only built-in attention reads block masks", _LEAVE_ONE),
    Conflict(draft_tree, plugin_attention, "only built-in attention reads draft trees", _LEAVE_ONE),
    Conflict(
        draft_path,
        no_draft_model,
        "it drafts without a model",
        "leave the model out, or use --speculative-algorithm STANDALONE",
    ),
    Conflict(relaxed, deterministic, "answers depend on the drafts", _LEAVE_ONE),
    Conflict(
        draft_model,
        saver_without_draft,
        "draft weights are not read again",
        "add --enable-draft-weights-cpu-backup, or leave one of them out",
    ),
    # Several decode steps in one plan. While their number is open, these make it 1 instead.
    Conflict(multi_step, drafting, "drafts are verified step by step", _LEAVE_ONE),
    Conflict(multi_step, several_ranks, "ranks agree on every step", _LEAVE_ONE),
    Conflict(multi_step, dp_attention, "replicas agree on every step", _LEAVE_ONE),
    Conflict(multi_step, disaggregation, "pages are transferred between steps", _LEAVE_ONE),
    Conflict(multi_step, watched_layers, "steps are eager", _LEAVE_ONE),
    Conflict(multi_step, recorder, "passes are counted one by one", _LEAVE_ONE),
    Conflict(multi_step, eplb, "passes are counted one by one", _LEAVE_ONE),
    Conflict(multi_step, embedding_model, "it decodes nothing", _LEAVE_ONE),
    # Experts.
    Conflict(eplb, fake_dispatch, "fake choices are balanced already", "use static or dynamic"),
    Conflict(returned_experts, embedding_model, "", _LEAVE_IT),
    Conflict(
        returned_experts,
        disaggregation,
        "the experts of prompt tokens are not transferred",
        "serve such requests with one server",
    ),
    # Disaggregation and pipeline stages.
    Conflict(pipeline, encoder, "encoders run in one stage", "use --tensor-parallel-size"),
)
"""Checked from top to bottom; the first conflict is the one that is reported."""
