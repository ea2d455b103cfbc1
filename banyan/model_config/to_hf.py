"""Writes config.json from the ModelConfig of a GGUF file: the inverse of `from_hf.py`.

The written file is read back and compared (`to_gguf.py`, differences), so a field without a key
here is an error and never lost. Source: the documented keys of transformers' configuration classes.
"""

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.families import FAMILIES
from banyan.model_config.model_config import FULL, ExpertFacts, LatentFacts, ModelConfig, RopeFacts

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
