"""Tiny checkpoints of models with states: family and keys of its configuration."""

from tests.models.family_experts import LATENT, MOE

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
    **MOE,
    **LATENT,
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
_MINIMAX = {
    "intermediate_size": 20,
    "head_dim": 8,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "block_size": 16,
}
_ZAMBA = {
    "n_mamba_heads": 6,
    "mamba_ngroups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "chunk_size": 16,
    "adapter_rank": 5,
    "num_key_value_heads": 6,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
}
_NEXT = {
    **MOE,
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
            **MOE,
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
            **MOE,
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
    "minimax": ("MiniMax", {**_MINIMAX}),
    "minimax, all factors": (
        "MiniMax",
        {
            **_MINIMAX,
            "head_dim": 10,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
            "num_hidden_layers": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "rms_norm_eps": 0.02,
            "full_attn_alpha_factor": 3.5,
            "full_attn_beta_factor": 1.2,
            "linear_attn_alpha_factor": 0.4,
            "linear_attn_beta_factor": 0.9,
            "mlp_alpha_factor": 2.5,
            "mlp_beta_factor": 0.7,
            "tie_word_embeddings": True,
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
    "zamba2": (
        "Zamba2",
        {
            **_ZAMBA,
            "num_hidden_layers": 7,
            "layers_block_type": ["linear_attention", *["hybrid"] * 3, "linear_attention"]
            + ["hybrid"] * 2,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "time_step_min": 0.3,
        },
    ),
    "zamba2, one block, biases": (
        "Zamba2",
        {
            **_ZAMBA,
            "num_key_value_heads": 3,
            "mamba_ngroups": 1,
            "add_bias_linear": True,
            "rms_norm_eps": 0.01,
        },
    ),
}
"""Families whose layers keep a state."""
