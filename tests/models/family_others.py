"""Tiny random checkpoints of further families: configuration class and changes to `SIZES`."""

from tests.models.family_sizes import LINEAR, WINDOW, YARN

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 64}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "head_dim": 6,
    "num_key_value_heads": 6,
}
HEADS = {"num_key_value_heads": 6}
_KINDS = ["sliding_attention", "full_attention"] * 2
_SPARSE = ["dense", "sparse", "sparse", "sparse"]
_STRETCHED = {**YARN, "original_max_position_embeddings": 32, "attention_factor": 1.2}

OTHERS: dict[str, tuple[str, dict]] = {
    "gemma": ("Gemma", {"head_dim": 10}),
    "vaultgemma": ("VaultGemma", {**WINDOW, "head_dim": 10, "query_pre_attn_scalar": 24}),
    "olmo": ("Olmo", {}),
    "olmo, clamped": ("Olmo", {"clip_qkv": 0.7, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {**WINDOW, "layer_types": None}),
    "olmo3, yarn": (
        "Olmo3",
        {**WINDOW, "layer_types": _KINDS, "rope_parameters": _STRETCHED},
    ),
    "flex olmo": ("FlexOlmo", {"num_experts": 5, "num_experts_per_tok": 2}),
    "seed oss": ("SeedOss", {"head_dim": 12}),
    "seed oss, no bias": ("SeedOss", {"head_dim": 8, "attention_bias": False}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 1]}),
    "smollm3, by period": ("SmolLM3", {"tie_word_embeddings": False}),
    "cwm": ("Cwm", {**WINDOW, "head_dim": 10, "layer_types": _KINDS}),
    "helium": ("Helium", {"head_dim": 8}),
    "ministral": ("Ministral", {**WINDOW, "head_dim": 10, "layer_types": _KINDS}),
    "arcee": ("Arcee", {"head_dim": 8}),
    "arcee, bias": ("Arcee", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "afmoe": (
        "Afmoe",
        {**MOE, **WINDOW, "num_experts": 5, "num_shared_experts": 2, "head_dim": 10},
    ),
    "afmoe, scaled": (
        "Afmoe",
        {
            **MOE,
            **WINDOW,
            "num_experts": 6,
            "num_shared_experts": 1,
            "head_dim": 8,
            "mup_enabled": True,
            "route_scale": 2.5,
            "num_dense_layers": 2,
            "global_attn_every_n_layers": 2,
        },
    ),
    "exaone4": ("Exaone4", {**WINDOW, "sliding_window_pattern": 2}),
    "exaone4, no windows": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "exaone moe": (
        "ExaoneMoe",
        {**MOE, **WINDOW, "num_experts": 5, "mlp_layer_types": _SPARSE},
    ),
    "cohere": ("Cohere", {}),
    "cohere, norms of heads": ("Cohere", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2 moe": (
        "Cohere2Moe",
        {**WINDOW, "num_experts": 5, "head_dim": 10, "layer_types": _KINDS},
    ),
    "cohere2 moe, sigmoid": (
        "Cohere2Moe",
        {
            **WINDOW,
            "num_experts": 6,
            "head_dim": 8,
            "expert_selection_fn": "sigmoid",
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "sum",
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "layer_types": _KINDS,
            "prefix_dense_intermediate_size": 72,
        },
    ),
    "stablelm": ("StableLm", {"num_key_value_heads": 6}),
    "stablelm, parallel": (
        "StableLm",
        {
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "use_qkv_bias": True,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "persimmon": ("Persimmon", {"num_key_value_heads": 6}),
    "persimmon, no norms": ("Persimmon", {"num_key_value_heads": 6, "qk_layernorm": False}),
    "jais2": ("Jais2", {"head_dim": 8}),
    "apertus": ("Apertus", {}),
    "apertus, bias": ("Apertus", {"attention_bias": True, "tie_word_embeddings": True}),
    "nanochat": ("NanoChat", {}),
    "phi": ("Phi", {"num_key_value_heads": 6}),
    "phi, norms of heads": ("Phi", {"qk_layernorm": True}),
    "nemotron": ("Nemotron", {"head_dim": 8}),
    "nemotron, bias": ("Nemotron", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "glm": ("Glm", {"head_dim": 12}),
    "glm4 moe lite": (
        "Glm4MoeLite",
        {**MOE, **LATENT, "n_routed_experts": 6, "n_group": 2, "mlp_layer_types": _SPARSE},
    ),
    "solar open": (
        "SolarOpen",
        {**MOE, "n_routed_experts": 5, "head_dim": 10, "routed_scaling_factor": 1.7},
    ),
    "minicpm3": ("MiniCPM3", {**LATENT, "dim_model_base": 12}),
    "youtu": ("Youtu", {**LATENT}),
    "hy v3": ("HYV3", {**MOE, "num_experts": 5, "head_dim": 10}),
    "mellum": (
        "Mellum",
        {
            **MOE,
            **WINDOW,
            "num_experts": 5,
            "head_dim": 10,
            "layer_types": _KINDS,
            "mlp_layer_types": _SPARSE,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "granite moe, shared": (
        "GraniteMoeShared",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 28,
            "residual_multiplier": 0.3,
        },
    ),
    "granite swa": (
        "GraniteSWA",
        {**WINDOW, "layer_rope_theta": [0, 500, 500, 0], "attention_multiplier": 0.2},
    ),
    "granite moe swa": (
        "GraniteMoeSWA",
        {
            **WINDOW,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 28,
            "logits_scaling": 3.0,
        },
    ),
    "hyperclova x": (
        "HyperCLOVAX",
        {"residual_multiplier": 0.3, "logits_scaling": 0.4, "embedding_multiplier": 5.0},
    ),
    "hyperclova x, no norms after": ("HyperCLOVAX", {"use_post_norm": False}),
    "gpt2": ("GPT2", {**HEADS}),
    "gpt2, gelu": (
        "GPT2",
        {**HEADS, "activation_function": "gelu", "n_inner": 56, "tie_word_embeddings": False},
    ),
    "gpt bigcode": ("GPTBigCode", {**HEADS}),
    "gpt bigcode, all heads": ("GPTBigCode", {**HEADS, "multi_query": False}),
    "gpt neo": (
        "GPTNeo",
        {**HEADS, "attention_types": [[["global", "local"], 2]], "window_size": 7},
    ),
    "gptj": ("GPTJ", {**HEADS, "rotary_dim": 4}),
    "codegen": ("CodeGen", {"num_key_value_heads": 4, "num_attention_heads": 4, "rotary_dim": 6}),
    "gpt neox": ("GPTNeoX", {**HEADS}),
    "gpt neox, one after another": (
        "GPTNeoX",
        {
            **HEADS,
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_new",
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0},
        },
    ),
    "opt": ("OPT", {**HEADS, "word_embed_proj_dim": 48, "ffn_dim": 60}),
    "opt, galactica": (
        "OPT",
        {
            **HEADS,
            "word_embed_proj_dim": 48,
            "ffn_dim": 60,
            "activation_function": "gelu",
            "enable_bias": False,
        },
    ),
    "biogpt": ("BioGpt", {**HEADS}),
    "xglm": ("XGLM", {**HEADS, "ffn_dim": 60}),
    "bloom": ("Bloom", {**HEADS}),
    "mpt": ("Mpt", {**HEADS, "max_seq_len": 128}),
    "mpt, clamped": ("Mpt", {**HEADS, "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.2}}),
    "falcon": ("Falcon", {"ffn_hidden_size": 60}),
    "falcon, groups": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon, alibi": ("Falcon", {"alibi": True, "multi_query": False, "parallel_attn": False}),
}
