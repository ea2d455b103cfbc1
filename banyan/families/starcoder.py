"""StarCoder2 (arXiv 2402.19173): layer norms with bias and a feed-forward block without a gate."""

from banyan.families.base import GELU_TANH, Biases, Family, GgufForm, HubForm
from banyan.families.names import GGUF_NAMES, HUB_NAMES, NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields


def _biases(fields: CheckpointFields) -> Biases:
    has_bias = fields.flag("use_bias", default=True)
    return Biases(has_bias, has_bias, has_bias)


STARCODER2 = Family(
    hub=HubForm(eps_key="norm_epsilon", eps=1e-5, activation=GELU_TANH, tied=True, biases=_biases),
    gguf=GgufForm("Starcoder2ForCausalLM", GELU_TANH, "attention.layer_norm_epsilon"),
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
