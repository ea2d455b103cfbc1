"""dots.llm1 (arXiv 2506.05767): Qwen3's attention, experts routed as in DeepSeek-V3."""

from dataclasses import replace

from banyan.families.base import MAX_LENGTH, Family, GgufForm, HubForm, Kinds, window_where
from banyan.families.experts import corrected, gguf_corrected
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_CORRECTED_EXPERTS,
    HUB_NAMES,
    HUB_QK_NORM,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig


def _kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    """The window begins above the first `max_window_layers`."""
    if not fields.has("sliding_window"):
        return (), 0
    first = fields.integer("max_window_layers", 0, MAX_LENGTH, default=62)
    return window_where(fields, num_layers, lambda layer: layer >= first)


def _experts(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return replace(
        model_config, experts=corrected(fields, model_config, is_normalised=False, scale=1.0)
    )


def _of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return replace(model_config, experts=gguf_corrected(fields, model_config, is_normalised=False))


DOTS1 = Family(
    hub=HubForm(kinds=_kinds, more=_experts),
    gguf=GgufForm("Dots1ForCausalLM", more=_of_gguf),
    names={
        "safetensors": NameMap(HUB_NAMES | HUB_QK_NORM | HUB_CORRECTED_EXPERTS),
        "gguf": NameMap(GGUF_NAMES | GGUF_QK_NORM | GGUF_EXPERTS),
    },
    qk_norm="head",
)
