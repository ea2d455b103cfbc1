"""Tiny checkpoints of models of experts: family and keys of its configuration."""

from tests.models.family_sizes import LONGROPE, WINDOW, YARN

MOE = {"moe_intermediate_size": 20, "num_experts_per_tok": 3}
LATENT = {
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
_STEP_KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
LLAMA4 = {
    "intermediate_size_mlp": 36,
    "num_experts_per_tok": 1,
    "head_dim": 12,
    "attention_chunk_size": 64,
    "pad_token_id": 0,
}
EXPERTS: dict[str, tuple[str, dict]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 3}),
    "mixtral, window, one of seven": (
        "Mixtral",
        {**WINDOW, "num_local_experts": 7, "num_experts_per_tok": 1},
    ),
    "llama4": ("Llama4Text", {**LLAMA4, "num_local_experts": 3}),
    "llama4, dense layers, no norm, no positions": (
        "Llama4Text",
        {
            **LLAMA4,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "no_rope_layers": [1, 0, 0, 1],
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 4, "norm_topk_prob": True}),
    "qwen2 moe": ("Qwen2Moe", {**MOE, "num_experts": 5, "shared_expert_intermediate_size": 28}),
    "qwen2 moe, some dense": (
        "Qwen2Moe",
        {
            **MOE,
            "num_experts": 8,
            "shared_expert_intermediate_size": 12,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
        },
    ),
    "qwen3 moe": ("Qwen3Moe", {**MOE, "num_experts": 5, "head_dim": 10, "norm_topk_prob": True}),
    "qwen3 moe, six of 21": (
        "Qwen3Moe",
        {**MOE, "num_experts": 6, "moe_intermediate_size": 21, "head_dim": 8},
    ),
    "qwen3 moe, all eight": (
        "Qwen3Moe",
        {**MOE, "num_experts": 8, "num_experts_per_tok": 8, "head_dim": 8},
    ),
    "deepseek v2": (
        "DeepseekV2",
        {**MOE, **LATENT, "n_routed_experts": 5, "n_shared_experts": 2, "q_lora_rank": None},
    ),
    "deepseek v2, groups, yarn": (
        "DeepseekV2",
        {
            **MOE,
            **LATENT,
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
            **MOE,
            **LATENT,
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
            **MOE,
            **LATENT,
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
            **MOE,
            **LATENT,
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
            **MOE,
            **LATENT,
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
            **MOE,
            **LATENT,
            **_INDEX,
            "n_routed_experts": 5,
            "n_shared_experts": 1,
            "q_lora_rank": 18,
        },
    ),
    "glm4 moe": (
        "Glm4Moe",
        {
            **MOE,
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
            **MOE,
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
        {**MOE, "n_routed_experts": 6, "n_shared_experts": 2, "attention_bias": True},
    ),
    "dots1, some windows": (
        "Dots1",
        {
            **MOE,
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
    "step 3.7": (
        "Step3p7",
        {
            **MOE,
            **WINDOW,
            "num_attention_heads": 4,
            "num_sliding_attention_heads": 6,
            "pad_token_id": 0,
            "head_dim": 10,
            "layer_types": _STEP_KINDS,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "n_routed_experts": 5,
            "share_expert_dim": 12,
            "moe_router_scaling_factor": 1.7,
            "swiglu_limits": [0.0, 0.4, 0.0, 0.3],
            "swiglu_limits_shared": [0.5, 0.0, 0.3, 0.4],
            "rope_parameters": {
                _STEP_KINDS[0]: {
                    "rope_type": "llama3",
                    "rope_theta": 5e4,
                    "partial_rotary_factor": 0.6,
                    "factor": 2.0,
                    "original_max_position_embeddings": 32,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 32.0,
                },
                _STEP_KINDS[1]: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "step 3.7, all full, no limits": (
        "Step3p7",
        {
            **MOE,
            **WINDOW,
            "head_dim": 8,
            "mlp_layer_types": ["sparse", "dense", "dense", "sparse"],
            "n_routed_experts": 4,
            "share_expert_dim": 20,
            "pad_token_id": 0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "hunyuan moe": ("HunYuanMoEV1", {"head_dim": 10, "num_experts": 5, "moe_topk": 3}),
}
