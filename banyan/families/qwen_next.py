"""Qwen3-Next and Qwen3.5: gated delta nets, gated attention in every fourth layer, and experts or
one feed-forward block. Of Qwen3.5 that is the part for text; what sees is not read.

Source: the published configurations of Qwen/Qwen3-Next-80B-A3B and Qwen/Qwen3.5.
"""

from dataclasses import replace

from banyan.config.card import FULL, STATE, ModelCard, StateFacts
from banyan.config.facts import Facts
from banyan.families.base import MAX_WIDTH, Family, HubForm, Kinds, state_where
from banyan.families.experts import qwen_moe
from banyan.families.lfm import MAX_TAPS
from banyan.families.names import HUB_EXPERTS, HUB_NAMES, HUB_QK_NORM, NameMap
from banyan.families.qwen import HUB_SHARED

_MAX_HEADS = 4096


def _kinds(facts: Facts, num_layers: int) -> Kinds:
    period = facts.integer("full_attention_interval", 1, 1 << 16, default=4)
    names = {"full_attention": FULL, "linear_attention": STATE}
    kinds = state_where(facts, num_layers, names, lambda at: STATE if (at + 1) % period else FULL)
    return kinds, 0


def _of_hub(facts: Facts, card: ModelCard) -> ModelCard:
    key_heads = facts.integer("linear_num_key_heads", 1, _MAX_HEADS, default=16)
    heads = facts.integer("linear_num_value_heads", 1, _MAX_HEADS, default=32)
    if heads % key_heads:
        raise facts.error("linear_num_value_heads", heads, f"a multiple of {key_heads} key heads")
    state = StateFacts(
        mixer="delta",
        taps=facts.integer("linear_conv_kernel_dim", 2, MAX_TAPS, default=4),
        heads=heads,
        key_heads=key_heads,
        key_dim=facts.integer("linear_key_head_dim", 1, MAX_WIDTH, default=128),
        value_dim=facts.integer("linear_value_head_dim", 1, MAX_WIDTH, default=128),
    )
    card = replace(card, state=state)
    if "Qwen3_5" in card.architecture:
        card = replace(card, state=replace(state, is_grouped=False))
    if card.architecture.startswith("Qwen3_5For"):
        return card
    if facts.integer("num_experts", 0, 1 << 16, default=512) == 0:
        return card
    return qwen_moe(facts, card, has_shared=True, is_normalised=True)


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
    "model.layers.{}.mlp.experts.gate_up_proj": ("layers.{}.mlp.experts.gate_up:gate*+up*.weight"),
    "model.layers.{}.mlp.experts.down_proj": "layers.{}.mlp.experts.down:*.weight",
}

QWEN3_NEXT = Family(
    hub=_HUB,
    names={
        "safetensors": NameMap(
            _HUB_NAMES
            | {
                "model.layers.{}.linear_attn.in_proj_qkvz": "layers.{}.attention.mix",
                "model.layers.{}.linear_attn.in_proj_ba": "layers.{}.attention.rates",
            },
            norm_offset=1.0,
            unread=("mtp.",),
        )
    },
    qk_norm="head",
    has_attention_gate=True,
)

QWEN35 = replace(
    QWEN3_NEXT,
    hub=replace(_HUB, is_nested=True),
    names={
        "safetensors": NameMap(
            _APART
            | {
                name.replace("model.", "model.language_model.", 1): place
                for name, place in _APART.items()
            },
            norm_offset=1.0,
            unread=("mtp.", "model.visual."),
        )
    },
)
