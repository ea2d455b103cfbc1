"""Writes the configuration of a checkpoint from a ModelConfig: the keys of config.json, and the
metadata of a GGUF file; the inverse of `from_hf.py` and `from_gguf.py`.

The written file is read back and compared (`differences`), so a field without a key here is an
error and never lost. Sources: the documented keys of transformers' configuration classes;
docs/gguf.md of ggml-org/ggml and gguf-py's constants.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.families import FAMILIES, GGUF, known_gguf
from banyan.families.base import GgufForm
from banyan.model_config.from_gguf import llama3_divisors
from banyan.model_config.model_config import (
    FULL,
    WINDOW,
    ExpertFacts,
    LatentFacts,
    ModelConfig,
    RopeFacts,
)

_MODEL_TYPES = {
    **{"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"},
    **{"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"},
    **{"Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3_text"},
    **{"Phi3ForCausalLM": "phi3", "Olmo2ForCausalLM": "olmo2"},
    **{"GraniteForCausalLM": "granite", "Glm4ForCausalLM": "glm4"},
    **{"Starcoder2ForCausalLM": "starcoder2", "Cohere2ForCausalLM": "cohere2"},
    **{"Ernie4_5ForCausalLM": "ernie4_5", "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense"},
    **{"MixtralForCausalLM": "mixtral", "OlmoeForCausalLM": "olmoe"},
    **{"Qwen2MoeForCausalLM": "qwen2_moe", "Qwen3MoeForCausalLM": "qwen3_moe"},
    **{"DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3"},
    **{"Glm4MoeForCausalLM": "glm4_moe", "Dots1ForCausalLM": "dots1"},
    **{"Ernie4_5_MoeForCausalLM": "ernie4_5_moe", "GraniteMoeForCausalLM": "granitemoe"},
    **{"HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe", "GptOssForCausalLM": "gpt_oss"},
    "MiniMaxM2ForCausalLM": "minimax_m2",
}
"""Class -> model_type, for the classes that can be written."""

Keys = dict[str, object]


def hub_keys(model_config: ModelConfig, dtype: str) -> Keys:
    """The content of config.json.

    Args:
        dtype: of all weights that are not projections: float32 | bfloat16 | float16.

    Raises:
        ModelError: the model's class cannot be written.
    """
    model_type = _MODEL_TYPES.get(model_config.architecture)
    if model_type is None:
        raise ModelError(
            f"no config.json is made for {printable(model_config.architecture)}, which this "
            "GGUF file of "
            f"the architecture {printable(model_config.model_type)} holds",
            hint="choose one of the types that GGUF files have, or name the folder it was made of",
        )
    form = FAMILIES.load(model_config.architecture).hub
    keys: Keys = {
        "architectures": [model_config.architecture],
        "model_type": model_type,
        "torch_dtype": dtype,
        "vocab_size": model_config.vocab_size,
        "hidden_size": model_config.hidden_size,
        "intermediate_size": model_config.intermediate_size,
        "num_hidden_layers": model_config.num_layers,
        "num_attention_heads": model_config.num_heads,
        "num_key_value_heads": model_config.num_kv_heads,
        "max_position_embeddings": model_config.context_length,
        form.eps_key: model_config.norm_eps,
        form.activation_key: form.activation,
        "tie_word_embeddings": model_config.tie_embeddings,
        "bos_token_id": model_config.bos_id,
        "eos_token_id": _one_or_all(model_config.eos_ids),
        "pad_token_id": model_config.pad_id,
    }
    if model_config.latent is None:
        keys["head_dim"] = model_config.head_dim
        if model_config.rotary_dim:
            keys["partial_rotary_factor"] = model_config.rotary_dim / model_config.head_dim
    else:
        keys |= _latent(model_config.latent)
    rope = (
        model_config.rope
        if model_config.rope.kind != "none"
        else model_config.window_rope or model_config.rope
    )
    keys |= _rope(rope, model_config.context_length)
    if model_config.window_rope is not None and form.window_theta:
        keys["rope_local_base_freq"] = model_config.window_rope.theta
    return (
        keys
        | _biases(model_config)
        | _windows(model_config)
        | _factors(model_config)
        | _experts(model_config)
    )


def _one_or_all(ids: tuple[int, ...]) -> object:
    return ids[0] if len(ids) == 1 else list(ids) or None


def _rope(rope: RopeFacts, context_length: int) -> Keys:
    keys: Keys = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.kind in ("default", "none"):
        return keys
    length = rope.original_length or context_length
    scaling: Keys = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor}
        scaling |= {"high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.mscale_all_dim:
            scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
        if not rope.truncate:
            scaling["truncate"] = False
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = length
    if rope.kind == "longrope":
        scaling = {"rope_type": "longrope", "attention_factor": rope.attention_factor}
        scaling |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
        keys["original_max_position_embeddings"] = length
    return keys | {"rope_scaling": scaling}


def _biases(model_config: ModelConfig) -> Keys:
    """Each family has its own keys for biases and ignores other families' keys."""
    has_any = model_config.attention_bias or model_config.output_bias or model_config.mlp_bias
    if model_config.architecture.startswith(("Ernie4_5", "Starcoder2")):
        return {"use_bias": has_any}
    if model_config.architecture == "Qwen2MoeForCausalLM":
        return {"qkv_bias": model_config.attention_bias}
    if model_config.architecture == "Qwen2ForCausalLM":
        return {}
    keys: Keys = {"attention_bias": model_config.attention_bias}
    return keys | ({"mlp_bias": True} if model_config.mlp_bias else {})


def _windows(model_config: ModelConfig) -> Keys:
    if not model_config.window:
        return {"sliding_window": None}
    kinds = [model_config.kind_of(layer) for layer in range(model_config.num_layers)]
    listed = ["full_attention" if kind == FULL else "sliding_attention" for kind in kinds]
    keys: Keys = {"sliding_window": model_config.window, "layer_types": listed}
    if model_config.architecture.startswith(("Qwen", "Dots1")):
        keys |= {"use_sliding_window": True, "max_window_layers": 0}
    return keys


def _factors(model_config: ModelConfig) -> Keys:
    """Scales and caps, under the keys of the family."""
    if model_config.architecture.startswith("Gemma"):
        return {
            "query_pre_attn_scalar": _whole(model_config.attention_scale**-2),
            "attn_logit_softcapping": model_config.attention_cap or None,
            "final_logit_softcapping": model_config.logit_cap or None,
        }
    if model_config.architecture.startswith("Granite"):
        return {
            "embedding_multiplier": model_config.embedding_scale,
            "residual_multiplier": model_config.residual_scale,
            "attention_multiplier": model_config.attention_scale,
            "logits_scaling": 1 / model_config.logit_scale,
        }
    if model_config.architecture.startswith("Cohere"):
        return {"logit_scale": model_config.logit_scale}
    if model_config.architecture == "Glm4MoeForCausalLM":
        return {"use_qk_norm": model_config.qk_norm == "head"}
    return {}


def _whole(value: float) -> float | int:
    """Undo the rounding of sqrt and square: most of these numbers are whole."""
    return round(value) if abs(value - round(value)) < 1e-6 * value else value


def _latent(latent: LatentFacts) -> Keys:
    return {
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
    }


def _experts(model_config: ModelConfig) -> Keys:
    """The experts, under the keys of the family."""
    experts = model_config.experts
    if experts is None:
        return {}
    name = model_config.architecture
    if name.startswith(("Deepseek", "Glm4", "Dots1")):
        return _like_deepseek(model_config, experts)
    if name.startswith("Ernie4_5"):
        return _like_ernie(model_config, experts)
    if name.startswith("HunYuan"):
        shared = experts.shared_inner // max(1, model_config.intermediate_size)
        keys: Keys = {"num_experts": experts.count, "moe_topk": experts.per_token}
        return keys | {"moe_intermediate_size": experts.inner, "num_shared_expert": shared}
    if name.startswith("Qwen"):
        return _like_qwen(experts)
    count = "num_experts" if name.startswith("Olmoe") else "num_local_experts"
    keys = {count: experts.count, "num_experts_per_tok": experts.per_token}
    if name.startswith("Olmoe"):
        keys["norm_topk_prob"] = experts.is_normalised
    if name.startswith("GptOss"):
        keys["swiglu_limit"] = experts.limit
    if name.startswith("MiniMaxM2"):
        keys["scoring_func"] = experts.scoring
    # These families use intermediate_size for the experts.
    return keys | {"intermediate_size": experts.inner}


def _like_deepseek(model_config: ModelConfig, experts: ExpertFacts) -> Keys:
    keys: Keys = {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.inner,
        "n_shared_experts": experts.shared_inner // experts.inner or None,
        "first_k_dense_replace": len(experts.dense_layers),
        "n_group": experts.groups,
        "topk_group": experts.top_groups,
        "norm_topk_prob": experts.is_normalised,
        "routed_scaling_factor": experts.scale,
    }
    if model_config.architecture == "DeepseekV2ForCausalLM":
        keys["topk_method"] = "greedy" if experts.groups == 1 else "group_limited_greedy"
        return keys | {"scoring_func": experts.scoring}
    return keys | {"scoring_func": experts.scoring, "topk_method": "noaux_tc"}


def _like_ernie(model_config: ModelConfig, experts: ExpertFacts) -> Keys:
    sparse = [
        layer for layer in range(model_config.num_layers) if layer not in experts.dense_layers
    ]
    steps = {b - a for a, b in zip(sparse, sparse[1:], strict=False)}
    interval = steps.pop() if len(steps) == 1 else 1
    return {
        "moe_num_experts": experts.count,
        "moe_k": experts.per_token,
        "moe_intermediate_size": experts.inner,
        "moe_num_shared_experts": experts.shared_inner // experts.inner,
        "moe_layer_start_index": sparse[0] if sparse else model_config.num_layers,
        "moe_layer_end_index": model_config.num_layers - 1,
        "moe_layer_interval": interval,
    }


def _like_qwen(experts: ExpertFacts) -> Keys:
    keys: Keys = {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.inner,
        "norm_topk_prob": experts.is_normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts.dense_layers),
    }
    if experts.has_shared_gate:
        keys["shared_expert_intermediate_size"] = experts.shared_inner
    return keys


_SOFTMAX, _SIGMOID = 1, 2
_OTHER_NAMES = {"MixtralForCausalLM": "llama", "MistralForCausalLM": "llama"}
"""Classes whose GGUF files use another class's architecture."""
_NOT_HELD = ("path", "format", "model_type", "dtype", "quant", "num_mtp_layers")
_EOS_KEYS = ("eos", "eot", "eom")
_WITH_PERIODS = ("ernie4_5-moe",)
"""Architectures whose files state the interval of layers with experts."""
_CLOSE = 1e-5
"""Relative tolerance: GGUF stores numbers as float32."""


def gguf_keys(model_config: ModelConfig) -> dict[str, object]:
    """The architecture's keys and the token ids.

    Raises:
        ModelError: no GGUF architecture is known for the model's class.
    """
    name, form = _architecture(model_config)
    own: dict[str, object] = {
        "block_count": model_config.num_layers,
        "context_length": model_config.context_length,
        "embedding_length": model_config.hidden_size,
        "feed_forward_length": model_config.intermediate_size,
        "attention.head_count": model_config.num_heads,
        "attention.head_count_kv": model_config.num_kv_heads,
        "attention.key_length": model_config.head_dim,
        "attention.value_length": model_config.head_dim,
        form.eps_key: float(model_config.norm_eps),
        "rope.dimension_count": model_config.rotary_dim or model_config.head_dim,
        "vocab_size": model_config.vocab_size,
        **_gguf_rope(model_config.rope),
        **_gguf_factors(model_config),
    }
    if model_config.window:
        own["attention.sliding_window"] = model_config.window
        if not form.window_period and FULL in model_config.layer_kinds:
            kinds = [
                model_config.kind_of(layer) == WINDOW for layer in range(model_config.num_layers)
            ]
            own["attention.sliding_window_pattern"] = kinds
    if model_config.experts is not None:
        own |= _gguf_experts(model_config.experts)
        if name in _WITH_PERIODS:
            own["interleave_moe_layer_step"] = 1
    ids = {f"{key}_token_id": id for key, id in zip(_EOS_KEYS, model_config.eos_ids, strict=False)}
    ids |= {f"{key}_token_id": id for key, id in _other_ids(model_config) if id is not None}
    return {
        "general.architecture": name,
        **{f"{name}.{key}": value for key, value in own.items()},
        **{f"tokenizer.ggml.{key}": id for key, id in ids.items()},
    }


def rope_divisors(model_config: ModelConfig) -> list[float]:
    """The values of "rope_freqs.weight" for Llama 3's RoPE scaling; [] for other kinds."""
    is_stretched = model_config.rope.kind == "llama3"
    return (
        llama3_divisors(model_config.rope, model_config.rotary_dim or model_config.head_dim)
        if is_stretched
        else []
    )


def differences(model_config: ModelConfig, written: ModelConfig) -> list[str]:
    """Fields whose value differs in the written file, one message each."""
    mistral = {"MistralForCausalLM", "LlamaForCausalLM"}  # the same architecture, but for a window
    found: list[str] = []
    for name, mine, its in _unlike("", model_config, written):
        if name in _NOT_HELD or (
            name == "eos_ids" and {*model_config.eos_ids} == {*written.eos_ids}
        ):
            continue
        if name == "architecture" and {model_config.architecture, written.architecture} == mistral:
            continue
        found.append(f"{name} is {printable(str(mine), 80)}, not {printable(str(its), 80)}")
    return found


def _unlike(name: str, mine: object, its: object) -> Iterator[tuple[str, object, object]]:
    if is_dataclass(mine) and type(mine) is type(its):
        for each in fields(mine):
            inner = f"{name}.{each.name}" if name else each.name
            yield from _unlike(inner, getattr(mine, each.name), getattr(its, each.name))
    elif isinstance(mine, float) and isinstance(its, float):
        if abs(mine - its) > _CLOSE * max(abs(mine), abs(its)):
            yield name, mine, its
    elif mine != its:
        yield name, mine, its


def _architecture(model_config: ModelConfig) -> tuple[str, GgufForm]:
    wanted = _OTHER_NAMES.get(model_config.architecture, "")
    for name in known_gguf():
        form = FAMILIES.load(GGUF + name).gguf
        if form is not None and (name == wanted or form.architecture == model_config.architecture):
            return name, form
    raise ModelError(
        f"no GGUF architecture is known for {printable(model_config.architecture)}",
        hint="choose one of the types that folders have",
    )


def _other_ids(model_config: ModelConfig) -> tuple[tuple[str, int | None], ...]:
    return ("bos", model_config.bos_id), ("padding", model_config.pad_id)


def _gguf_rope(rope: RopeFacts) -> dict[str, object]:
    keys: dict[str, object] = {"rope.freq_base": float(rope.theta)}
    if rope.kind not in ("linear", "yarn"):
        return keys
    keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
    if rope.original_length:
        keys["rope.scaling.original_context_length"] = rope.original_length
    if rope.kind == "yarn":
        keys["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        keys["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    return keys


def _gguf_factors(model_config: ModelConfig) -> dict[str, object]:
    """Scales and caps that differ from their defaults."""
    factors = {
        "embedding_scale": (model_config.embedding_scale, 1.0),
        "residual_scale": (model_config.residual_scale, 1.0),
        "attention.scale": (model_config.attention_scale, 0.0),
        "logit_scale": (_logit_scale(model_config), 1.0),
        "attn_logit_softcapping": (model_config.attention_cap, 0.0),
        "final_logit_softcapping": (model_config.logit_cap, 0.0),
    }
    return {key: float(value) for key, (value, plain) in factors.items() if value != plain}


def _logit_scale(model_config: ModelConfig) -> float:
    """Granite's files store the divisor of the logits."""
    return (
        1 / model_config.logit_scale
        if model_config.architecture.startswith("Granite")
        else model_config.logit_scale
    )


def _gguf_experts(experts: ExpertFacts) -> dict[str, object]:
    keys: dict[str, object] = {
        "expert_count": experts.count,
        "expert_used_count": experts.per_token,
        "expert_feed_forward_length": experts.inner,
        "expert_weights_norm": experts.is_normalised,
        "expert_gating_func": _SIGMOID if experts.scoring == "sigmoid" else _SOFTMAX,
    }
    if experts.scoring == "sigmoid" or experts.scale != 1.0:
        keys["expert_weights_scale"] = float(experts.scale)
    if experts.scoring == "sigmoid" or experts.shared_inner or experts.dense_layers:
        keys["leading_dense_block_count"] = len(experts.dense_layers)
    if experts.shared_inner:
        keys["expert_shared_feed_forward_length"] = experts.shared_inner
        if not experts.has_shared_gate:
            keys["expert_shared_count"] = max(1, experts.shared_inner // experts.inner)
            keys["expert_shared_feed_forward_length"] = experts.inner
    if experts.scoring == "sigmoid" or experts.groups > 1:
        keys["expert_group_count"] = experts.groups
        keys["expert_group_used_count"] = experts.top_groups
    return keys
