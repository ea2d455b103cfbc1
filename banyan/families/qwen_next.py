"""Qwen3-Next and Qwen3.5: gated delta nets, gated attention in every fourth layer, and experts or
one feed-forward block. Qwen3.5's vision tower is not loaded.

Source: the published configurations of Qwen/Qwen3-Next-80B-A3B and Qwen/Qwen3.5. In GGUF files of
Qwen3-Next the rates are ordered by key head, in older files all projections. In GGUF files of
Qwen3.5 the value heads are interleaved.
"""

from collections.abc import Container
from dataclasses import replace

from banyan.families.base import MAX_WIDTH, Family, GgufForm, HubForm, Kinds, MTPForm, state_where
from banyan.families.experts import gguf_qwen2_moe, qwen_moe, without_mtp_layers
from banyan.families.lfm import MAX_CONV_KERNEL
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_EXPERTS,
    HUB_NAMES,
    HUB_QK_NORM,
    NameMap,
)
from banyan.families.qwen import HUB_SHARED
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import FULL, STATE, ModelConfig, StateFacts

_MAX_HEADS = 4096
_MTP = "mtp."


def _kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    period = fields.integer("full_attention_interval", 1, 1 << 16, default=4)
    names = {"full_attention": FULL, "linear_attention": STATE}
    kinds = state_where(fields, num_layers, names, lambda at: STATE if (at + 1) % period else FULL)
    return kinds, 0


def _of_hub(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    key_heads = fields.integer("linear_num_key_heads", 1, _MAX_HEADS, default=16)
    heads = fields.integer("linear_num_value_heads", 1, _MAX_HEADS, default=32)
    if heads % key_heads:
        raise fields.error("linear_num_value_heads", heads, f"a multiple of {key_heads} key heads")
    state = StateFacts(
        mixer="delta",
        conv_kernel=fields.integer("linear_conv_kernel_dim", 2, MAX_CONV_KERNEL, default=4),
        heads=heads,
        key_heads=key_heads,
        key_dim=fields.integer("linear_key_head_dim", 1, MAX_WIDTH, default=128),
        value_dim=fields.integer("linear_value_head_dim", 1, MAX_WIDTH, default=128),
    )
    model_config = replace(
        model_config, state=state, num_mtp_layers=_mtp_layers(fields, model_config)
    )
    if "Qwen3_5" in model_config.architecture:
        model_config = replace(
            model_config, state=replace(state, is_grouped=False, has_grouped_rates=False)
        )
    if model_config.architecture.startswith("Qwen3_5For"):
        return model_config
    if fields.integer("num_experts", 0, 1 << 16, default=512) == 0:
        return model_config
    return qwen_moe(fields, model_config, has_shared=True, is_normalised=True)


def _mtp_layers(fields: CheckpointFields, model_config: ModelConfig) -> int:
    """Number of MTP layers. Qwen3-Next has one that its configuration does not mention."""
    usual = int(model_config.architecture.startswith("Qwen3Next"))
    found = fields.integer("mtp_num_hidden_layers", 0, 64, default=usual)
    return 0 if fields.flag("mtp_use_dedicated_embeddings", default=False) else found


def _gguf_kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    period = fields.integer("full_attention_interval", 1, 1 << 16, default=4)
    last = num_layers - fields.integer("nextn_predict_layers", 0, num_layers - 1, default=0)
    return tuple(STATE if (at + 1) % period else FULL for at in range(last)), 0


def _of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    heads = fields.integer("ssm.time_step_rank", 1, _MAX_HEADS)
    key_heads = fields.integer("ssm.group_count", 1, _MAX_HEADS)
    inner = fields.integer("ssm.inner_size", 1, MAX_WIDTH)
    if heads % key_heads or inner % heads:
        rule = f"a multiple of {key_heads} key heads that divides {inner}"
        raise fields.error("ssm.time_step_rank", heads, rule)
    state = StateFacts(
        mixer="delta",
        conv_kernel=fields.integer("ssm.conv_kernel", 2, MAX_CONV_KERNEL),
        heads=heads,
        key_heads=key_heads,
        key_dim=fields.integer("ssm.state_size", 1, MAX_WIDTH),
        value_dim=inner // heads,
        is_grouped=False,
    )
    return replace(without_mtp_layers(fields, model_config), state=state)


def _next_of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return _normalised(gguf_qwen2_moe(fields, _of_gguf(fields, model_config)), fields)


def _of_gguf35(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    model_config = _of_gguf(fields, model_config)
    assert model_config.state is not None
    is_tiled = model_config.state.heads > model_config.state.key_heads
    return replace(
        model_config, state=replace(model_config.state, has_grouped_rates=False, is_tiled=is_tiled)
    )


def _moe_of_gguf35(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    model_config = gguf_qwen2_moe(fields, _of_gguf35(fields, model_config))
    return replace(_normalised(model_config, fields), architecture="Qwen3_5MoeForCausalLM")


def _normalised(model_config: ModelConfig, fields: CheckpointFields) -> ModelConfig:
    """Expert weights are normalized by default."""
    assert model_config.experts is not None
    is_normalised = fields.flag("expert_weights_norm", default=True)
    return replace(model_config, experts=replace(model_config.experts, is_normalised=is_normalised))


def _of_tensors(names: Container[str], model_config: ModelConfig) -> ModelConfig:
    """In older files the rows of the projections are ordered by key head."""
    assert model_config.state is not None
    at = model_config.layer_kinds.index(STATE)
    is_grouped = f"blk.{at}.ssm_in.weight" in names
    return replace(model_config, state=replace(model_config.state, is_grouped=is_grouped))


_GGUF_NAMES = NameMap(
    GGUF_NAMES
    | GGUF_QK_NORM
    | GGUF_EXPERTS
    | {
        "blk.{}.post_attention_norm": "layers.{}.mlp_norm",
        "blk.{}.ffn_gate_up_exps": "layers.{}.mlp.experts.gate_up:gate*+up*",
        "blk.{}.attn_qkv": "layers.{}.attention.mix:q+k+v",
        "blk.{}.attn_gate": "layers.{}.attention.mix:z",
        "blk.{}.ssm_in": "layers.{}.attention.mix",
        "blk.{}.ssm_ba": "layers.{}.attention.rates",
        "blk.{}.ssm_beta": "layers.{}.attention.rates:b",
        "blk.{}.ssm_alpha": "layers.{}.attention.rates:a",
        "blk.{}.ssm_conv1d": "layers.{}.attention.conv:q+k+v",
        "blk.{}.ssm_dt.bias": "layers.{}.attention.gates.bias",
        "blk.{}.ssm_a": "layers.{}.attention.gates.rate",
        "blk.{}.ssm_norm": "layers.{}.attention.norm",
        "blk.{}.ssm_out": "layers.{}.attention.out",
    },
    has_more_layers=True,
)

_HUB = HubForm(head_dim=256, rotary=0.25, kinds=_kinds, more=_of_hub)
_HUB_NAMES = (
    HUB_NAMES
    | HUB_QK_NORM
    | HUB_EXPERTS
    | HUB_SHARED
    | {
        "model.layers.{}.linear_attn.conv1d": "layers.{}.attention.conv:q+k+v",
        "model.layers.{}.linear_attn.dt_bias": "layers.{}.attention.gates.bias",
        "model.layers.{}.linear_attn.A_log": "layers.{}.attention.gates.rate",
        "model.layers.{}.linear_attn.norm": "layers.{}.attention.norm",
        "model.layers.{}.linear_attn.out_proj": "layers.{}.attention.out",
    }
)
_APART = _HUB_NAMES | {
    "model.layers.{}.linear_attn.in_proj_qkv": "layers.{}.attention.mix:q+k+v",
    "model.layers.{}.linear_attn.in_proj_z": "layers.{}.attention.mix:z",
    "model.layers.{}.linear_attn.in_proj_b": "layers.{}.attention.rates:b",
    "model.layers.{}.linear_attn.in_proj_a": "layers.{}.attention.rates:a",
}

_MTP_NAMES = NameMap(
    {
        name.replace("model.", _MTP): place
        for name, place in _HUB_NAMES.items()
        if "layers.{}." in name and "linear_attn" not in name
    }
    | {
        _MTP + name: f"layers.0.{place}"
        for name, place in {
            "fc": "join",
            "pre_fc_norm_embedding": "token_norm",
            "pre_fc_norm_hidden": "state_norm",
            "norm": "norm",
        }.items()
    },
    norm_offset=1.0,
)

QWEN3_NEXT = Family(
    hub=_HUB,
    gguf=GgufForm(
        "Qwen3NextForCausalLM", kinds=_gguf_kinds, more=_next_of_gguf, of_tensors=_of_tensors
    ),
    names={
        "gguf": _GGUF_NAMES,
        "safetensors": NameMap(
            _HUB_NAMES
            | {
                "model.layers.{}.linear_attn.in_proj_qkvz": "layers.{}.attention.mix",
                "model.layers.{}.linear_attn.in_proj_ba": "layers.{}.attention.rates",
            },
            norm_offset=1.0,
            unread=(_MTP,),
        ),
    },
    qk_norm="head",
    has_attention_gate=True,
    mtp=MTPForm({"safetensors": (_MTP, _MTP_NAMES)}),
)

QWEN35 = replace(
    QWEN3_NEXT,
    gguf=GgufForm("Qwen3_5ForCausalLM", kinds=_gguf_kinds, more=_of_gguf35),
    names={
        "gguf": _GGUF_NAMES,
        "safetensors": NameMap(
            _APART,
            norm_offset=1.0,
            unread=(_MTP,),
        ),
    },
)

QWEN35_MOE = replace(
    QWEN35, gguf=GgufForm("Qwen3_5MoeForCausalLM", kinds=_gguf_kinds, more=_moe_of_gguf35)
)
