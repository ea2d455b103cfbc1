"""MiniMax-M2: q and k normed over all heads, a part of each head rotates, and experts chosen by
sigmoid scores with a correction.

Source: the published configuration of MiniMaxAI/MiniMax-M2.
"""

from dataclasses import replace

from banyan.config.card import ModelCard
from banyan.config.facts import Facts
from banyan.families.base import Biases, Family, GgufForm, HubForm
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


def _experts(facts: Facts, card: ModelCard) -> ModelCard:
    """Some configurations give the part that rotates as a number of dimensions."""
    if facts.has("rotary_dim"):
        rotary = facts.integer("rotary_dim", 2, card.head_dim)
        card = replace(card, rotary_dim=rotary % card.head_dim)
    experts = mixtral_experts(facts, card)
    return replace(card, experts=replace(experts, scoring="sigmoid", has_correction=True))


def _of_gguf(facts: Facts, card: ModelCard) -> ModelCard:
    """It has no groups."""
    return replace(card, experts=replace(gguf_corrected(facts, card), group_best=1))


MINIMAX_M2 = Family(
    hub=HubForm(head_dim=128, rope_theta=5e6, biases=lambda facts: Biases(), more=_experts),
    gguf=GgufForm("MiniMaxM2ForCausalLM", more=_of_gguf),
    names={
        "gguf": NameMap(GGUF_NAMES | GGUF_QK_NORM | GGUF_EXPERTS),
        "safetensors": NameMap(
            HUB_NAMES
            | HUB_QK_NORM
            | HUB_MIXTRAL_EXPERTS
            | {
                "model.layers.{}.block_sparse_moe.e_score_correction_bias": (
                    "layers.{}.mlp.router.correction"
                )
            },
            has_more_layers=True,
        ),
    },
    qk_norm="width",
)
