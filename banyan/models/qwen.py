"""Qwen2, Qwen2.5 (arXiv 2412.15115) and Qwen3 (arXiv 2505.09388)."""

from banyan.models.spec import (
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_NAMES,
    HUB_QK_NORM,
    ArchSpec,
    NameMap,
)

QWEN2 = ArchSpec(names={"safetensors": NameMap(HUB_NAMES), "gguf": NameMap(GGUF_NAMES)})

QWEN3 = ArchSpec(
    names={
        "safetensors": NameMap(HUB_NAMES | HUB_QK_NORM),
        "gguf": NameMap(GGUF_NAMES | GGUF_QK_NORM),
    },
    qk_norm="head",
)
