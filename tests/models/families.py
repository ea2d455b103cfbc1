"""Tiny random checkpoints of every family, of odd shapes, made by transformers."""

import json
from pathlib import Path

import torch
import transformers

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
WINDOW = {"sliding_window": 7}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.2, 2.0, 9.0],
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}

VARIANTS: dict[str, tuple[str, dict]] = {
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {**WINDOW, "head_dim": 10}),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied, some windows": (
        "Qwen2",
        {**WINDOW, "use_sliding_window": True, "max_window_layers": 2, "tie_word_embeddings": True},
    ),
    "qwen2, eight heads": (
        "Qwen2",
        {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "qwen2, yarn": (
        "Qwen2",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 32}},
    ),
    "qwen3": ("Qwen3", {"head_dim": 10}),
    "qwen3, bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {**WINDOW, "head_dim": 10, "query_pre_attn_scalar": 24}),
    "gemma2, sharp caps": (
        "Gemma2",
        {
            **WINDOW,
            "head_dim": 10,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2, no caps": (
        "Gemma2",
        {"head_dim": 10, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3Text", {**WINDOW, "head_dim": 10, "num_hidden_layers": 7}),
    "gemma3, stretched": (
        "Gemma3Text",
        {
            **WINDOW,
            "head_dim": 10,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3, window": ("Phi3", {**WINDOW}),
    "phi3, longrope on part of a head": (
        "Phi3",
        {
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 128,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2, one kv head": ("Olmo2", {"num_key_value_heads": 1}),
    "granite": ("Granite", {}),
    "granite, all factors": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "glm4": ("Glm4", {"head_dim": 12}),
    "glm4, no bias": ("Glm4", {"head_dim": 8, "attention_bias": False}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "starcoder2, window": ("Starcoder2", {**WINDOW, "tie_word_embeddings": False}),
    "starcoder2, no bias": ("Starcoder2", {"use_bias": False}),
    "cohere2": ("Cohere2", {**WINDOW, "num_hidden_layers": 5}),
    "ernie 4.5": ("Ernie4_5", {"head_dim": 10, "tie_word_embeddings": True}),
    "ernie 4.5, bias": ("Ernie4_5", {"head_dim": 8, "use_bias": True}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 10}),
    "hunyuan, bias": ("HunYuanDenseV1", {"head_dim": 8, "attention_bias": True}),
    "cohere2, bias": ("Cohere2", {**WINDOW, "attention_bias": True, "logit_scale": 0.7}),
}

_MOE = {"moe_intermediate_size": 20, "num_experts_per_tok": 3}
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 14,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 8,
    "head_dim": 6,
    "first_k_dense_replace": 1,
}
_YARN = {
    **YARN,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
# Heads enough that no two positions score alike: where all heads are below zero, the score is zero.
_INDEX = {"index_n_heads": 24, "index_head_dim": 10, "index_topk": 11}
EXPERTS: dict[str, tuple[str, dict]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 3}),
    "mixtral, window, one of seven": (
        "Mixtral",
        {**WINDOW, "num_local_experts": 7, "num_experts_per_tok": 1},
    ),
    "olmoe": ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 4, "norm_topk_prob": True}),
    "qwen2 moe": ("Qwen2Moe", {**_MOE, "num_experts": 5, "shared_expert_intermediate_size": 28}),
    "qwen2 moe, some dense": (
        "Qwen2Moe",
        {
            **_MOE,
            "num_experts": 8,
            "shared_expert_intermediate_size": 12,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
        },
    ),
    "qwen3 moe": ("Qwen3Moe", {**_MOE, "num_experts": 5, "head_dim": 10, "norm_topk_prob": True}),
    "qwen3 moe, six of 21": (
        "Qwen3Moe",
        {**_MOE, "num_experts": 6, "moe_intermediate_size": 21, "head_dim": 8},
    ),
    "qwen3 moe, all eight": (
        "Qwen3Moe",
        {**_MOE, "num_experts": 8, "num_experts_per_tok": 8, "head_dim": 8},
    ),
    "deepseek v2": (
        "DeepseekV2",
        {**_MOE, **_LATENT, "n_routed_experts": 5, "n_shared_experts": 2, "q_lora_rank": None},
    ),
    "deepseek v2, groups, yarn": (
        "DeepseekV2",
        {
            **_MOE,
            **_LATENT,
            "n_routed_experts": 9,
            "n_shared_experts": 1,
            "q_lora_rank": 18,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek v3": (
        "DeepseekV3",
        {
            **_MOE,
            **_LATENT,
            "n_routed_experts": 12,
            "n_shared_experts": 1,
            "q_lora_rank": 18,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek v3, yarn, one group": (
        "DeepseekV3",
        {
            **_MOE,
            **_LATENT,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek v3.2": (
        "DeepseekV32",
        {
            **_MOE,
            **_LATENT,
            **_INDEX,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "q_lora_rank": 18,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "deepseek v3.2, yarn, all dense but one": (
        "DeepseekV32",
        {
            **_MOE,
            **_LATENT,
            **_INDEX,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "q_lora_rank": 18,
            "n_group": 1,
            "topk_group": 1,
            "index_topk": 1,
            "mlp_layer_types": ["dense", "sparse", "dense", "dense"],
            "rope_parameters": _YARN,
        },
    ),
    "glm moe dsa": (
        "GlmMoeDsa",
        {
            **_MOE,
            **_LATENT,
            **_INDEX,
            "n_routed_experts": 5,
            "n_shared_experts": 1,
            "q_lora_rank": 18,
        },
    ),
    "glm4 moe": (
        "Glm4Moe",
        {
            **_MOE,
            "head_dim": 12,
            "n_routed_experts": 5,
            "first_k_dense_replace": 2,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.3,
            "num_nextn_predict_layers": 0,
        },
    ),
    "glm4 moe, groups, no norm": (
        "Glm4Moe",
        {
            **_MOE,
            "head_dim": 8,
            "n_routed_experts": 12,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "num_nextn_predict_layers": 0,
        },
    ),
    "dots1": (
        "Dots1",
        {**_MOE, "n_routed_experts": 6, "n_shared_experts": 2, "attention_bias": True},
    ),
    "dots1, some windows": (
        "Dots1",
        {
            **_MOE,
            **WINDOW,
            "max_window_layers": 2,
            "n_routed_experts": 7,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "ernie 4.5 moe": (
        "Ernie4_5_Moe",
        {
            "moe_intermediate_size": 20,
            "moe_k": 3,
            "moe_num_experts": 5,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
    ),
    "ernie 4.5 moe, every other layer, none shared": (
        "Ernie4_5_Moe",
        {
            "moe_intermediate_size": 12,
            "moe_k": 1,
            "moe_num_experts": 7,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 2,
            "tie_word_embeddings": True,
        },
    ),
    "granite moe": (
        "GraniteMoe",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 6.0,
        },
    ),
    "minimax m2": (
        "MiniMaxM2",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "phi moe": (
        "Phimoe",
        {"num_local_experts": 6, "router_jitter_noise": 0.3, "sliding_window": None},
    ),
    "phi moe, all biases, longrope": (
        "Phimoe",
        {
            "num_local_experts": 3,
            "attention_bias": True,
            "lm_head_bias": True,
            "head_dim": 6,
            "rope_parameters": {**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.4},
            "original_max_position_embeddings": 128,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            **WINDOW,
            "head_dim": 8,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.6,
        },
    ),
    "gpt-oss, plain rope, all full, no bias": (
        "GptOss",
        {
            "head_dim": 10,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "layer_types": ["full_attention"] * 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "hunyuan moe": ("HunYuanMoEV1", {"head_dim": 10, "num_experts": 5, "moe_topk": 3}),
}


_LFM2 = {"block_multiple_of": 8, "tie_word_embeddings": False}
_MAMBA = {
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 16,
}
_JAMBA = {
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 12,
    "mamba_d_conv": 3,
    "mamba_dt_rank": 7,
    "num_experts_per_tok": 1,
}
_KIMI = {
    **_MOE,
    **_LATENT,
    "num_experts_per_tok": 2,
    "linear_num_heads": 4,
    "linear_head_dim": 10,
}
_MUP = {
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.3,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.6,
    "key_multiplier": 0.5,
    "mlp_multipliers": [0.7, 0.4],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.3,
    "ssm_multipliers": [0.9, 0.4, 1.3, 0.8, 0.6],
}
_NEMOTRON = {
    "num_hidden_layers": None,
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 12,
    "conv_kernel": 3,
    "chunk_size": 16,
    "time_step_min": 1e-20,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
}
_NEXT = {
    **_MOE,
    "head_dim": 16,
    "num_experts": 5,
    "shared_expert_intermediate_size": 12,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
}
STATES: dict[str, tuple[str, dict]] = {
    "lfm2": ("Lfm2", {**_LFM2, "full_attn_idxs": [1, 3]}),
    "lfm2, attention first, biases": (
        "Lfm2",
        {
            **_LFM2,
            "conv_bias": True,
            "conv_L_cache": 4,
            "layer_types": ["full_attention", "conv", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            "num_heads": 8,
            "head_dim": 12,
            "state_size": 10,
            "n_groups": 2,
            "conv_kernel": 3,
            "chunk_size": 16,
            "use_bias": True,
            "layer_norm_epsilon": 1e-4,
        },
    ),
    "mamba": (
        "Mamba",
        {
            "state_size": 10,
            "conv_kernel": 3,
            "time_step_rank": 5,
            "use_bias": True,
            "layer_norm_epsilon": 1e-4,
            "tie_word_embeddings": False,
        },
    ),
    "jamba": (
        "Jamba",
        {
            **_JAMBA,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
    ),
    "jamba, dense, biases": (
        "Jamba",
        {**_JAMBA, "num_experts": 1, "mamba_proj_bias": True, "tie_word_embeddings": True},
    ),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "bamba, one group, biases": (
        "Bamba",
        {
            **_MAMBA,
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "time_step_limit": [0.2, 0.9],
            "attn_layer_indices": [0, 3],
        },
    ),
    "falcon h1": (
        "FalconH1",
        {
            **_MAMBA,
            **_MUP,
            "mamba_d_ssm": 60,
            "mamba_d_head": 10,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "falcon h1, no norm, biases": (
        "FalconH1",
        {
            **_MAMBA,
            "mamba_d_ssm": None,
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "mlp_multipliers": [0.7, 1.0],
            "ssm_multipliers": [0.9, 0.4, 1.3, 0.8, 0.6],
            "ssm_out_multiplier": 0.3,
            "tie_word_embeddings": True,
        },
    ),
    "falcon h1, norm before the gate": (
        "FalconH1",
        {**_MAMBA, "mamba_d_ssm": 96, "mamba_rms_norm": True, "num_hidden_layers": 2},
    ),
    "nemotron h": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"] * 2,
            "n_routed_experts": 6,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.7,
            "moe_latent_size": 22,
        },
    ),
    "nemotron h, dense, biases": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"],
            "n_groups": 1,
            "attention_bias": False,
            "use_bias": True,
            "mlp_bias": True,
        },
    ),
    "nemotron h, wide experts": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": ["full_attention", "moe", "linear_attention"],
            "n_routed_experts": 3,
        },
    ),
    "granite hybrid": (
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 36,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 6.0,
        },
    ),
    "granite hybrid, experts, rope": (
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 20,
            "mamba_n_groups": 1,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "position_embedding_type": "rope",
        },
    ),
    "lfm2 moe": (
        "Lfm2Moe",
        {
            **_MOE,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 5,
            "routed_scaling_factor": 1.4,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2 moe, no bias of the choice": (
        "Lfm2Moe",
        {
            **_MOE,
            "layer_types": ["conv"] * 3 + ["full_attention"],
            "num_experts": 8,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "conv_bias": True,
        },
    ),
    "qwen3.5": (
        "Qwen3_5Text",
        {**_NEXT, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "head_dim": 32},
    ),
    "qwen3.5 moe": (
        "Qwen3_5MoeText",
        {**_NEXT, "layer_types": ["full_attention", "linear_attention"] * 2},
    ),
    "kimi linear": (
        "KimiLinear",
        {
            **_KIMI,
            "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
            "num_local_experts": 6,
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "kimi linear, attention first, all experts": (
        "KimiLinear",
        {
            **_KIMI,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "num_local_experts": 3,
            "n_shared_experts": 2,
            "mlp_layer_types": ["sparse"] * 4,
            "linear_conv_kernel_dim": 3,
            "norm_topk_prob": False,
        },
    ),
    "qwen3 next": ("Qwen3Next", {**_NEXT}),
    "qwen3 next, dense, shared keys": (
        "Qwen3Next",
        {
            **_NEXT,
            "num_experts": 0,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "tie_word_embeddings": True,
        },
    ),
}
"""Families whose layers keep a state."""


def tiny(variant: str, folder: Path, **more):
    """A random model of a variant, saved to `folder`; norms differ from one, biases from zero.

    Args:
        more: further keys of its configuration.
    """
    family, changes = (VARIANTS | EXPERTS | STATES)[variant]
    changes = changes | more
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    config._attn_implementation = "eager"  # the one that knows soft caps
    config._experts_implementation = "eager"  # the one that takes any width
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.2 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn_like(parameter) * spread)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(folder)
    return model


def rewrite_config(folder: Path, **changes) -> None:
    """Change keys of a saved config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
