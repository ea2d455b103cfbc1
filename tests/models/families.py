"""Tiny random checkpoints of every family, of odd shapes, made by transformers."""

import json
from pathlib import Path

import torch
import transformers

from tests.models.family_experts import EXPERTS
from tests.models.family_others import OTHERS
from tests.models.family_sizes import LINEAR, LONGROPE, SCALED, SEES, SIZES, WINDOW, YARN
from tests.models.family_states import STATES

VARIANTS: dict[str, tuple[str, dict]] = {
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {**WINDOW, "head_dim": 10}),
    "ministral3": ("Ministral3", {"rope_parameters": SCALED, "head_dim": 12}),
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


def tiny(variant: str, folder: Path, weights: float = 0.2, **more):
    """A random model of a variant, saved to `folder`; norms differ from one, biases from zero.

    Args:
        weights: their standard deviation; less where rows are wider.
        more: further keys of its configuration.
    """
    family, changes = (VARIANTS | EXPERTS | STATES | OTHERS)[variant]
    changes = changes | more
    torch.manual_seed(11)
    config = _config(family, {**SIZES, **changes})
    # Eager attention knows soft caps; Falcon's adds ALiBi twice.
    config._attn_implementation = "sdpa" if family == "Falcon" else "eager"
    config._experts_implementation = "eager"  # the one that takes any width
    sees = config.get_text_config() is not config
    of = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model = of.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = weights if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn_like(parameter) * spread)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(folder)
    return model


def _config(family: str, values: dict):
    """Of models that see, the part for text has the values."""
    made = getattr(transformers, f"{family}Config")
    if "text_config" not in made.sub_configs:
        return made(**values)
    return made(text_config=values, vision_config=SEES)


def rewrite_config(folder: Path, **changes) -> None:
    """Change keys of a saved config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
