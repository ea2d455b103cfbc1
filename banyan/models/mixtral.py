"""Mixtral (arXiv 2401.04088): Llama's attention, and experts under names of their own."""

from banyan.models.spec import HUB_NAMES, ArchSpec, NameMap

MIXTRAL = ArchSpec(
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
    }
)
