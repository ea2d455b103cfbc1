"""Mixtral (arXiv 2401.04088): Llama's attention, and experts under names of their own."""

from banyan.families.base import Family, HubForm
from banyan.families.experts import mixtral
from banyan.families.names import HUB_NAMES, NameMap

MIXTRAL = Family(
    hub=HubForm(eps=1e-5, rope_theta=1e6, more=mixtral),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | {
                "model.layers.{}.block_sparse_moe.gate": "layers.{}.mlp.router",
                "model.layers.{}.block_sparse_moe.experts.{}.w1": (
                    "layers.{}.mlp.experts.gate_up:gate{}"
                ),
                "model.layers.{}.block_sparse_moe.experts.{}.w3": (
                    "layers.{}.mlp.experts.gate_up:up{}"
                ),
                "model.layers.{}.block_sparse_moe.experts.{}.w2": "layers.{}.mlp.experts.down:{}",
            }
        )
    },
)
