"""Qwen2, Qwen2.5 (arXiv 2412.15115) and Qwen3 (arXiv 2505.09388), dense and with experts.

Mellum 2: Qwen3 with experts and windows, each kind of layer with its own RoPE.
"""

from dataclasses import replace
from functools import partial

from banyan.families.base import (
    MAX_LENGTH,
    Biases,
    Family,
    GgufForm,
    HubForm,
    Kinds,
    MTPForm,
    window_listed,
    window_where,
    without_logits,
)
from banyan.families.experts import (
    dense_of,
    gguf_qwen2_moe,
    gguf_qwen3_moe,
    mtp_layers,
    qwen_moe,
)
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_EXPERTS,
    HUB_NAMES,
    HUB_QK_NORM,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig


def _kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    """With use_sliding_window, layers from `max_window_layers` on have a window."""
    if not fields.flag("use_sliding_window", default=False):
        return (), 0
    first = fields.integer("max_window_layers", 0, MAX_LENGTH, default=28)
    return window_where(fields, num_layers, lambda layer: layer >= first)


_HUB2 = HubForm(biases=lambda fields: Biases(qkv=True), kinds=_kinds)
_HUB3 = HubForm(head_dim=128, kinds=_kinds)

QWEN2 = Family(
    hub=_HUB2,
    gguf=GgufForm("Qwen2ForCausalLM"),
    names={"safetensors": NameMap(HUB_NAMES), "gguf": NameMap(GGUF_NAMES)},
)

QWEN3 = Family(
    hub=_HUB3,
    gguf=GgufForm("Qwen3ForCausalLM"),
    names={
        "safetensors": NameMap(HUB_NAMES | HUB_QK_NORM),
        "gguf": NameMap(GGUF_NAMES | GGUF_QK_NORM),
    },
    qk_norm="head",
)

_MIMO_MTP = "model.mtp_layers.{}."
_MIMO_MTP_NAMES = {
    name.replace("model.layers.{}.", _MIMO_MTP): its for name, its in HUB_NAMES.items()
} | {
    f"{_MIMO_MTP}token_layernorm": "layers.{}.token_norm",
    f"{_MIMO_MTP}hidden_layernorm": "layers.{}.state_norm",
    f"{_MIMO_MTP}input_proj": "layers.{}.join",
    f"{_MIMO_MTP}final_layernorm": "layers.{}.norm",
}
MIMO = replace(
    QWEN2,
    hub=replace(
        _HUB2,
        more=lambda fields, model_config: replace(model_config, num_mtp_layers=mtp_layers(fields)),
    ),
    gguf=None,
    names={"safetensors": NameMap(HUB_NAMES, unread=("model.mtp_layers.",))},
    mtp=MTPForm(
        {"safetensors": (_MIMO_MTP.format(0), NameMap(_MIMO_MTP_NAMES))}, has_states_first=True
    ),
)
"""MiMo (arXiv 2505.07608): Qwen2 with an MTP layer."""

QWEN2_BODY = replace(QWEN2, hub=replace(_HUB2, more=without_logits), gguf=None)
QWEN3_BODY = replace(QWEN3, hub=replace(_HUB3, more=without_logits), gguf=None)

HUB_SHARED = {
    "model.layers.{}.mlp.shared_expert.gate_proj": "layers.{}.mlp.shared.gate_up:gate",
    "model.layers.{}.mlp.shared_expert.up_proj": "layers.{}.mlp.shared.gate_up:up",
    "model.layers.{}.mlp.shared_expert.down_proj": "layers.{}.mlp.shared.down",
    "model.layers.{}.mlp.shared_expert_gate": "layers.{}.mlp.shared_gate",
}

QWEN2_MOE = Family(
    hub=HubForm(
        biases=lambda fields: Biases(qkv=fields.flag("qkv_bias", default=True)),
        kinds=_kinds,
        more=partial(qwen_moe, has_shared=True),
    ),
    gguf=GgufForm("Qwen2MoeForCausalLM", more=gguf_qwen2_moe),
    names={
        "safetensors": NameMap(HUB_NAMES | HUB_EXPERTS | HUB_SHARED),
        "gguf": NameMap(GGUF_NAMES | GGUF_EXPERTS),
    },
)

QWEN3_MOE = Family(
    hub=replace(_HUB3, more=qwen_moe),
    gguf=GgufForm("Qwen3MoeForCausalLM", more=gguf_qwen3_moe),
    names={
        "safetensors": NameMap(HUB_NAMES | HUB_QK_NORM | HUB_EXPERTS),
        "gguf": NameMap(GGUF_NAMES | GGUF_QK_NORM | GGUF_EXPERTS),
    },
    qk_norm="head",
)


def _mellum(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    model_config = qwen_moe(fields, model_config, is_normalised=True)
    assert model_config.experts is not None
    experts = replace(model_config.experts, dense_layers=dense_of(fields, model_config))
    return replace(model_config, experts=experts)


MELLUM = Family(
    hub=HubForm(
        head_dim=128,
        rope_theta=5e5,
        window_theta=1e4,
        kinds=window_listed,
        more=_mellum,
    ),
    names={"safetensors": NameMap(HUB_NAMES | HUB_QK_NORM | HUB_EXPERTS)},
    qk_norm="head",
)
