"""EXAONE 4 (arXiv 2507.11407): norms only after each block, a norm on each head of q and k. With
windows, full layers do not rotate. K-EXAONE: norms before each block, experts routed as in
DeepSeek-V3.

Source: the published configurations of LGAI-EXAONE.
"""

from dataclasses import replace

from banyan.families.base import MAX_LENGTH, Biases, Family, GgufForm, HubForm, Kinds, window_where
from banyan.families.experts import corrected_with
from banyan.families.names import (
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_CORRECTED_EXPERTS,
    HUB_NAMES,
    HUB_QK_NORM,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import FULL, ModelConfig


def _kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    """The pattern is a period, or letters: L has a window, G does not, nor has the last layer."""
    if not fields.has("sliding_window"):
        return (), 0
    pattern = fields.any("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        letters = pattern
    else:
        period = fields.integer("sliding_window_pattern", 1, MAX_LENGTH, default=4)
        return window_where(fields, num_layers, lambda layer: (layer + 1) % period > 0)
    last = num_layers - 1
    return window_where(
        fields, num_layers, lambda layer: layer < last and letters[layer % len(letters)] == "L"
    )


def _still(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Full layers next to window layers do not rotate."""
    has_window = model_config.window > 0 or fields.has("sliding_window")
    layers = range(model_config.num_layers) if has_window else ()
    full = tuple(layer for layer in layers if model_config.kind_of(layer) == FULL)
    return replace(model_config, unrotated=full)


EXAONE4 = Family(
    hub=HubForm(eps=1e-5, biases=lambda fields: Biases(), kinds=_kinds, more=_still),
    gguf=GgufForm("Exaone4ForCausalLM", window_period=4, more=_still),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | HUB_QK_NORM
            | {
                "model.layers.{}.post_attention_layernorm": "layers.{}.attention_post_norm",
                "model.layers.{}.post_feedforward_layernorm": "layers.{}.mlp_post_norm",
            }
        ),
        "gguf": NameMap(
            GGUF_NAMES
            | GGUF_QK_NORM
            | {
                "blk.{}.post_attention_norm": "layers.{}.attention_post_norm",
                "blk.{}.post_ffw_norm": "layers.{}.mlp_post_norm",
            },
            rope_divisors="rope_freqs.weight",
        ),
    },
    pre_norm=False,
    post_norm=True,
    qk_norm="head",
)

_KEYS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


def _experts(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    model_config = _still(fields, model_config)
    return corrected_with(fields, model_config, _KEYS, scale=2.5)


EXAONE_MOE = Family(
    hub=replace(EXAONE4.hub, more=_experts),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | HUB_QK_NORM
            | HUB_CORRECTED_EXPERTS
            | {"model.layers.{}.mlp.e_score_correction_bias": "layers.{}.mlp.router.correction"},
            has_more_layers=True,
            unread=("mtp.",),
        )
    },
    qk_norm="head",
)
