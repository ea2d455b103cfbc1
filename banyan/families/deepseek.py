"""DeepSeek-V2 (arXiv 2405.04434) and V3 / R1 (arXiv 2412.19437): latent attention and experts.
DeepSeek-V3.2 and GLM-5: the same with an indexer that chooses the positions each token reads.
GLM-4.7-Flash: V3's attention and routing. MiniCPM3 and Youtu: latent attention without experts.
dots.llm1 (arXiv 2506.05767): Qwen3's attention, experts routed as in DeepSeek-V3.

The first layers have plain feed-forward blocks; layers past the last one are MTP layers.
"""

from dataclasses import replace
from functools import partial

from banyan.families.base import MAX_LENGTH, Family, GgufForm, HubForm, Kinds, MTPForm, window_where
from banyan.families.experts import (
    corrected,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    gguf_corrected,
    gguf_deepseek,
    glm_dsa,
    latent_of,
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

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    hub=HubForm(
        eps=1e-5,
        head_dim=64,
        rope_theta=1e6,
        more=partial(deepseek_v3, scale=1.8),
    ),
    gguf=None,
)


def _interleaved(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    if not fields.flag("rope_interleave", default=True):
        raise fields.error("rope_interleave", False, "true")
    return latent_of(fields, model_config)


YOUTU = Family(
    hub=HubForm(tied=True, head_dim=64, more=_interleaved),
    names={"safetensors": NameMap(HUB_NAMES | _ATTENTION, paired=_PAIRED)},
)


def _scaled(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Factors that do not depend on the width and the depth."""
    depth, width = model_config.num_layers**0.5, model_config.hidden_size
    values = width // model_config.num_heads
    has_values = fields.has("v_head_dim")
    fields = fields if has_values else fields.with_values({"v_head_dim": values})
    return replace(
        latent_of(fields, model_config),
        embedding_scale=fields.number("scale_emb", 1e-6, 1e6, default=12.0),
        residual_scale=fields.number("scale_depth", 1e-6, 1e6, default=1.4) / depth,
        logit_scale=fields.number("dim_model_base", 1e-6, 1e6, default=256.0) / width,
    )


MINICPM3 = Family(
    hub=HubForm(eps=1e-5, tied=True, head_dim=32, more=_scaled),
    names={"safetensors": NameMap(HUB_NAMES | _ATTENTION)},
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
