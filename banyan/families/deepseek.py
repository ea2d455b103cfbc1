"""DeepSeek-V2 (arXiv 2405.04434) and V3 / R1 (arXiv 2412.19437): latent attention and experts.
DeepSeek-V3.2 and GLM-5: the same with an indexer that chooses the positions each token reads.
dots.llm1 (arXiv 2506.05767): Qwen3's attention, experts routed as in DeepSeek-V3.

The first layers have plain feed-forward blocks; layers past the last one are MTP layers.
"""

from dataclasses import replace

from banyan.families.base import MAX_LENGTH, Family, GgufForm, HubForm, Kinds, MTPForm, window_where
from banyan.families.experts import (
    corrected,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    gguf_corrected,
    gguf_deepseek,
    glm_dsa,
)
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_MTP,
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_CORRECTED_EXPERTS,
    HUB_MTP,
    HUB_NAMES,
    HUB_QK_NORM,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig

_ATTENTION = {
    "model.layers.{}.self_attn.q_proj": "layers.{}.attention.query",
    "model.layers.{}.self_attn.q_a_proj": "layers.{}.attention.squeeze",
    "model.layers.{}.self_attn.q_a_layernorm": "layers.{}.attention.query_norm",
    "model.layers.{}.self_attn.q_b_proj": "layers.{}.attention.query",
    "model.layers.{}.self_attn.kv_a_proj_with_mqa": "layers.{}.attention.latent",
    "model.layers.{}.self_attn.kv_a_layernorm": "layers.{}.attention.latent_norm",
    "model.layers.{}.self_attn.kv_b_proj": "layers.{}.attention.expansion",
}
_GGUF_ATTENTION = {
    "blk.{}.attn_q": "layers.{}.attention.query",
    "blk.{}.attn_q_a": "layers.{}.attention.squeeze",
    "blk.{}.attn_q_a_norm": "layers.{}.attention.query_norm",
    "blk.{}.attn_q_b": "layers.{}.attention.query",
    "blk.{}.attn_kv_a_mqa": "layers.{}.attention.latent",
    "blk.{}.attn_kv_a_norm": "layers.{}.attention.latent_norm",
    "blk.{}.attn_kv_b": "layers.{}.attention.expansion",
}
_PAIRED = ("layers.{}.attention.query", "layers.{}.attention.latent")

DEEPSEEK_V2 = Family(
    hub=HubForm(head_dim=64, more=deepseek_v2),
    gguf=GgufForm("DeepseekV2ForCausalLM", more=gguf_deepseek),
    names={
        "safetensors": NameMap(
            HUB_NAMES | HUB_CORRECTED_EXPERTS | _ATTENTION,
            paired=_PAIRED,
            has_more_layers=True,
        ),
        "gguf": NameMap(
            GGUF_NAMES | GGUF_EXPERTS | _GGUF_ATTENTION, paired=_PAIRED, has_more_layers=True
        ),
    },
)

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    hub=HubForm(head_dim=64, more=deepseek_v3),
    mtp=MTPForm(
        {
            "safetensors": (
                "model.layers.{}.",
                NameMap(HUB_NAMES | HUB_CORRECTED_EXPERTS | _ATTENTION | HUB_MTP, paired=_PAIRED),
            ),
            "gguf": (
                "blk.{}.",
                NameMap(GGUF_NAMES | GGUF_EXPERTS | _GGUF_ATTENTION | GGUF_MTP, paired=_PAIRED),
            ),
        }
    ),
)

_INDEXER = "layers.{}.attention.indexer"
_SPARSE = NameMap(
    HUB_NAMES
    | HUB_CORRECTED_EXPERTS
    | _ATTENTION
    | {
        "model.layers.{}.self_attn.indexer.wq_b": f"{_INDEXER}.query",
        "model.layers.{}.self_attn.indexer.wk": f"{_INDEXER}.key",
        "model.layers.{}.self_attn.indexer.k_norm": f"{_INDEXER}.key_norm",
        "model.layers.{}.self_attn.indexer.weights_proj": f"{_INDEXER}.weigh",
    },
    paired=_PAIRED,
    has_more_layers=True,
)
_SPARSE_MTP = replace(_SPARSE, modules={**_SPARSE.modules, **HUB_MTP}, has_more_layers=False)
DEEPSEEK_V32 = Family(
    hub=HubForm(head_dim=64, more=deepseek_v32),
    names={"safetensors": _SPARSE},
    mtp=MTPForm({"safetensors": ("model.layers.{}.", _SPARSE_MTP)}),
)

_PAIRED_INDEXER = tuple(f"{_INDEXER}.{name}" for name in ("query", "key", "key_norm"))
GLM_MOE_DSA = Family(
    hub=HubForm(eps=1e-5, head_dim=64, more=glm_dsa),
    names={"safetensors": replace(_SPARSE, paired=(*_PAIRED, *_PAIRED_INDEXER))},
    mtp=MTPForm(
        {
            "safetensors": (
                "model.layers.{}.",
                replace(_SPARSE_MTP, paired=(*_PAIRED, *_PAIRED_INDEXER)),
            )
        }
    ),
)


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
