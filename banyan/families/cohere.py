"""Cohere (Command R, R+): one layer norm feeds attention and feed-forward in parallel. RoPE rotates
in pairs 2i, 2i + 1. The largest model norms each head of q and k with weights of its own.
Cohere 2 (Command R7B, Command A): window layers rotate, full layers have no position embedding.
Cohere 2 with experts: the first layers may have plain feed-forward blocks, which rotate too.

Source: the published configurations of CohereForAI/c4ai-command-r-v01 and c4ai-command-r7b.
"""

from dataclasses import replace
from functools import partial

from banyan.families.base import MAX_WIDTH, Family, GgufForm, HubForm, full_at_every, llama_biases
from banyan.families.experts import MAX_EXPERTS, dense_of
from banyan.families.names import (
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_CORRECTED_EXPERTS,
    HUB_NAMES,
    QK,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import FULL, ExpertFacts, ModelConfig, RopeFacts

_OWN_NORMS = ("layers.{}.attention.q_norm:*", "layers.{}.attention.k_norm:*")


def _scaled(
    fields: CheckpointFields, model_config: ModelConfig, default_scale: float
) -> ModelConfig:
    scale = fields.number("logit_scale", 1e-6, 1e6, default=default_scale)
    return replace(model_config, logit_scale=scale)


def _of_hub(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    is_normed = fields.flag("use_qk_norm", default=False)
    model_config = _scaled(fields, model_config, 0.0625)
    return replace(model_config, qk_norm="each head" if is_normed else "")


COHERE = Family(
    hub=HubForm(
        eps_key="layer_norm_eps",
        eps=1e-5,
        tied=True,
        rope_theta=5e5,
        biases=lambda fields: replace(llama_biases(fields), mlp=False),
        more=_of_hub,
    ),
    gguf=GgufForm(
        "CohereForCausalLM",
        eps_key="attention.layer_norm_epsilon",
        more=partial(_scaled, default_scale=1.0),
    ),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | {
                "model.layers.{}.self_attn.q_norm": _OWN_NORMS[0],
                "model.layers.{}.self_attn.k_norm": _OWN_NORMS[1],
            },
            paired=QK + _OWN_NORMS,
        ),
        "gguf": NameMap(
            GGUF_NAMES | {name: own for name, own in zip(GGUF_QK_NORM, _OWN_NORMS, strict=True)},
            paired=QK + _OWN_NORMS,
        ),
    },
    norm="layer",
    parallel="one norm",
)


def _positions_in_windows(
    fields: CheckpointFields, model_config: ModelConfig, default_scale: float
) -> ModelConfig:
    """Only window layers have a position embedding."""
    return replace(
        _scaled(fields, model_config, default_scale),
        rope=RopeFacts(kind="none"),
        window_rope=model_config.rope,
    )


COHERE2 = Family(
    hub=HubForm(
        eps_key="layer_norm_eps",
        eps=1e-5,
        tied=True,
        kinds=partial(full_at_every, period=4),
        more=partial(_positions_in_windows, default_scale=0.0625),
    ),
    gguf=GgufForm(
        "Cohere2ForCausalLM",
        eps_key="attention.layer_norm_epsilon",
        window_period=4,
        more=partial(_positions_in_windows, default_scale=1.0),
    ),
    names={
        "safetensors": NameMap(HUB_NAMES, paired=QK),
        "gguf": NameMap(GGUF_NAMES, paired=QK),
    },
    norm="layer",
    parallel="one norm",
)


def _experts(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Plain layers have their own width, and rotate even without a window."""
    count = fields.integer("num_experts", 1, MAX_EXPERTS)
    scoring = fields.text("expert_selection_fn", default="softmax")
    if scoring not in ("softmax", "sigmoid"):
        raise fields.error("expert_selection_fn", scoring, "softmax or sigmoid")
    shared = fields.integer("num_shared_experts", 0, MAX_EXPERTS, default=0)
    if shared and fields.text("shared_expert_combination_strategy", default="average") != "sum":
        raise fields.error("shared_expert_combination_strategy", "average", "sum")
    if fields.has("rms_norm_eps"):
        raise fields.error("rms_norm_eps", fields.any("rms_norm_eps"), "null: layer norms")
    dense = dense_of(fields, model_config)
    inner = model_config.intermediate_size
    experts = ExpertFacts(
        count,
        fields.integer("num_experts_per_tok", 1, count, default=2),
        inner,
        dense_layers=dense,
        shared_inner=shared * inner,
        scoring=scoring,
        is_normalised=scoring == "softmax" or fields.flag("norm_topk_prob", default=True),
    )
    wide = "prefix_dense_intermediate_size"
    width = fields.integer(wide, 1, MAX_WIDTH) if fields.has(wide) else inner
    model_config = replace(model_config, experts=experts, intermediate_size=width)
    turned = fields.integer("prefix_dense_sliding_window_pattern", 0, 1 << 16, default=1) == 1
    full = [at for at in range(model_config.num_layers) if model_config.kind_of(at) == FULL]
    still = tuple(at for at in full if not (turned and at in dense))
    return replace(_scaled(fields, model_config, 0.0625), unrotated=still)


COHERE2_MOE = replace(
    COHERE2,
    hub=replace(COHERE2.hub, head_dim=128, more=_experts),
    gguf=None,
    names={"safetensors": NameMap(HUB_NAMES | HUB_CORRECTED_EXPERTS, paired=QK)},
)
