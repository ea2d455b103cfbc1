"""LFM2 (arXiv 2511.23404): gated short convolutions, and full attention in a few layers."""

from dataclasses import replace

from banyan.config.card import FULL, STATE, ModelCard, StateFacts
from banyan.config.facts import Facts
from banyan.families.base import MAX_WIDTH, Family, HubForm, Kinds, state_where
from banyan.families.names import HUB_NAMES, NameMap

MAX_TAPS = 16


def _kinds(facts: Facts, num_layers: int) -> Kinds:
    full = facts.listed("full_attn_idxs") or list(range(num_layers))
    names = {"full_attention": FULL, "conv": STATE}
    kinds = state_where(facts, num_layers, names, lambda at: FULL if at in full else STATE)
    return kinds, 0


def _of_hub(facts: Facts, card: ModelCard) -> ModelCard:
    inner = card.intermediate_size
    if facts.flag("block_auto_adjust_ff_dim", default=True):
        inner = int(2 * inner / 3)
        inner = int(inner * facts.number("block_ffn_dim_multiplier", 1e-3, 1e3, default=1.0))
        multiple = facts.integer("block_multiple_of", 1, MAX_WIDTH, default=256)
        inner = -(-inner // multiple) * multiple
    has_bias = facts.flag("conv_bias", default=False)
    state = StateFacts(
        mixer="conv",
        taps=facts.integer("conv_L_cache", 2, MAX_TAPS, default=3),
        has_conv_bias=has_bias,
        has_bias=has_bias,
    )
    tied = facts.flag("tie_embedding", default=card.tie_embeddings)
    return replace(card, intermediate_size=inner, state=state, tie_embeddings=tied)


_NAMES = {name: place for name, place in HUB_NAMES.items() if ".mlp." not in place}

LFM2 = Family(
    hub=HubForm(
        eps_key="norm_eps",
        eps=1e-5,
        inner_keys=("block_ff_dim", "intermediate_size"),
        tied=True,
        rope_theta=1e6,
        kinds=_kinds,
        more=_of_hub,
    ),
    names={
        "safetensors": NameMap(
            _NAMES
            | {
                "model.embedding_norm": "norm",
                "model.layers.{}.operator_norm": "layers.{}.attention_norm",
                "model.layers.{}.ffn_norm": "layers.{}.mlp_norm",
                "model.layers.{}.self_attn.out_proj": "layers.{}.attention.out",
                "model.layers.{}.self_attn.q_layernorm": "layers.{}.attention.q_norm",
                "model.layers.{}.self_attn.k_layernorm": "layers.{}.attention.k_norm",
                "model.layers.{}.conv.in_proj": "layers.{}.attention.mix:b+c+x",
                "model.layers.{}.conv.conv": "layers.{}.attention.conv",
                "model.layers.{}.conv.out_proj": "layers.{}.attention.out",
                "model.layers.{}.feed_forward.w1": "layers.{}.mlp.gate_up:gate",
                "model.layers.{}.feed_forward.w3": "layers.{}.mlp.gate_up:up",
                "model.layers.{}.feed_forward.w2": "layers.{}.mlp.down",
            }
        )
    },
    qk_norm="head",
)
