"""Qwen2, Qwen2.5 (arXiv 2412.15115) and Qwen3 (arXiv 2505.09388), dense and with experts."""

from banyan.models.spec import (
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_EXPERTS,
    HUB_NAMES,
    HUB_QK_NORM,
    ArchSpec,
    NameMap,
)

_SHARED = {
    "model.layers.{}.mlp.shared_expert.gate_proj": "layers.{}.mlp.shared.gate_up:gate",
    "model.layers.{}.mlp.shared_expert.up_proj": "layers.{}.mlp.shared.gate_up:up",
    "model.layers.{}.mlp.shared_expert.down_proj": "layers.{}.mlp.shared.down",
    "model.layers.{}.mlp.shared_expert_gate": "layers.{}.mlp.shared_gate",
}

QWEN2_MOE = ArchSpec(names={"safetensors": NameMap(HUB_NAMES | HUB_EXPERTS | _SHARED)})

QWEN3_MOE = ArchSpec(
    names={"safetensors": NameMap(HUB_NAMES | HUB_QK_NORM | HUB_EXPERTS)}, qk_norm="head"
)

QWEN2 = ArchSpec(names={"safetensors": NameMap(HUB_NAMES), "gguf": NameMap(GGUF_NAMES)})

QWEN3 = ArchSpec(
    names={
        "safetensors": NameMap(HUB_NAMES | HUB_QK_NORM),
        "gguf": NameMap(GGUF_NAMES | GGUF_QK_NORM),
    },
    qk_norm="head",
)
