"""StarCoder2 (arXiv 2402.19173): layer norms with bias and a feed-forward block without a gate."""

from banyan.models.spec import GGUF_NAMES, HUB_NAMES, ArchSpec, NameMap

STARCODER2 = ArchSpec(
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | {
                "model.layers.{}.mlp.c_fc": "layers.{}.mlp.up",
                "model.layers.{}.mlp.c_proj": "layers.{}.mlp.down",
            }
        ),
        "gguf": NameMap(GGUF_NAMES | {"blk.{}.ffn_up": "layers.{}.mlp.up"}),
    },
    norm="layer+bias",
    gated=False,
)
