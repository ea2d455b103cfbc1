"""MiniMax-Text-01 and M1: lightning attention, full attention in a few layers, experts, and a
normed residual stream. MiniMax-M2: q and k normed over all heads, partial RoPE, and experts with
corrected sigmoid scores.

Source: the published configurations of MiniMaxAI/MiniMax-Text-01, with its makers' keys and with
transformers' keys, and of MiniMaxAI/MiniMax-M2.
"""

from dataclasses import replace

from banyan.families.base import Biases, Family, GgufForm, HubForm, Kinds, state_where
from banyan.families.experts import gguf_corrected, mixtral_experts
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_MIXTRAL_EXPERTS,
    HUB_NAMES,
    HUB_QK_NORM,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import FULL, STATE, ModelConfig, NormedStream, StateFacts

_NORM_EPS = 1e-6
"""Eps of the norm after lightning attention; no configuration states it."""
_BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Constants that some checkpoints store."""


def _turned_part(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Some configurations give the number of rotated dimensions."""
    if not fields.has("rotary_dim"):
        return model_config
    rotary = fields.integer("rotary_dim", 2, model_config.head_dim)
    return replace(model_config, rotary_dim=rotary % model_config.head_dim)


def _kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    """The makers' files use 0 and 1 for the kinds."""
    if fields.has("sliding_window"):
        raise fields.error(
            "sliding_window", fields.any("sliding_window"), "null in a model with states"
        )
    names = {"full_attention": FULL, "linear_attention": STATE, "1": FULL, "0": STATE}
    key = "attn_type_list" if fields.has("attn_type_list") else "layer_types"
    default = (FULL, STATE)
    return state_where(fields, num_layers, names, lambda at: default[at % 2], key=key), 0


def _factor(fields: CheckpointFields, kind: str, name: str) -> float:
    """A factor of one kind of block, under the makers' key or transformers' key."""
    theirs, short = {
        "full": ("layernorm_full_attention", "full_attn"),
        "state": ("layernorm_linear_attention", "linear_attn"),
        "mlp": ("layernorm_mlp", "mlp"),
    }[kind]
    key = f"{theirs}_{name}"
    key = key if fields.has(key) else f"{short}_{name}_factor"
    return fields.number(key, 1e-3, 1e3, default=1.0)


def _text(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Stream and block have separate factors (alpha, beta).

    The stream is normed next, so its scale cancels up to eps: blocks get beta / alpha.
    """
    if not fields.flag("postnorm", default=True):
        raise fields.error("postnorm", False, "true")
    if fields.integer("shared_intermediate_size", 0, 1 << 20, default=0):
        raise fields.error(
            "shared_intermediate_size",
            fields.any("shared_intermediate_size"),
            "0: shared experts are not supported for this family",
        )
    stream = NormedStream(*(_factor(fields, kind, "alpha") for kind in ("full", "state", "mlp")))
    state = StateFacts(
        mixer="lightning",
        conv_kernel=0,
        heads=model_config.num_heads,
        key_heads=model_config.num_heads,
        key_dim=model_config.head_dim,
        value_dim=model_config.head_dim,
        norm_eps=_NORM_EPS,
        factor=_factor(fields, "state", "beta") / stream.state,
        depth=model_config.num_layers,
    )
    experts = mixtral_experts(fields, model_config)
    return replace(
        _turned_part(fields, model_config),
        state=state,
        normed_stream=stream,
        attention_factor=_factor(fields, "full", "beta") / stream.full,
        experts=replace(experts, scale=_factor(fields, "mlp", "beta") / stream.mlp),
    )


def _experts(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    model_config = _turned_part(fields, model_config)
    experts = mixtral_experts(fields, model_config)
    return replace(model_config, experts=replace(experts, scoring="sigmoid", has_correction=True))


def _of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """MiniMax-M2 has no expert groups."""
    return replace(
        model_config, experts=replace(gguf_corrected(fields, model_config), group_best=1)
    )


_LAYER = "model.layers.{}.self_attn"

MINIMAX = Family(
    hub=HubForm(
        eps=1e-5,
        context=1 << 17,
        rope_theta=1e6,
        biases=lambda fields: Biases(),
        kinds=_kinds,
        more=_text,
    ),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | HUB_MIXTRAL_EXPERTS
            | {
                f"{_LAYER}.qkv_proj": "layers.{}.attention.mix",
                f"{_LAYER}.output_gate": "layers.{}.attention.gate",
                f"{_LAYER}.norm": "layers.{}.attention.norm",
                f"{_LAYER}.out_proj": "layers.{}.attention.out",
            },
            ignored=tuple(f"{_LAYER}.{name}" for name in _BUFFERS),
        )
    },
)

MINIMAX_M2 = Family(
    hub=HubForm(head_dim=128, rope_theta=5e6, biases=lambda fields: Biases(), more=_experts),
    gguf=GgufForm("MiniMaxM2ForCausalLM", more=_of_gguf),
    names={
        "gguf": NameMap(GGUF_NAMES | GGUF_QK_NORM | GGUF_EXPERTS),
        "safetensors": NameMap(
            HUB_NAMES
            | HUB_QK_NORM
            | HUB_MIXTRAL_EXPERTS
            | {
                f"model.layers.{{}}.{block}.e_score_correction_bias": (
                    "layers.{}.mlp.router.correction"
                )
                for block in ("block_sparse_moe", "mlp")
            },
            has_more_layers=True,
        ),
    },
    qk_norm="width",
)
