"""OPT (arXiv 2205.01068), Galactica, BioGPT and XGLM: layer norms with bias, feed-forward blocks
without a gate, and a vector per position: learned, or of sines and cosines (XGLM). The first two
rows of the tables belong to no position.

Source: the published configurations of facebook/opt, microsoft/biogpt and facebook/xglm.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from banyan.families.base import Biases, Family, HubForm, renamed
from banyan.families.gpt import PLAIN_ACTIVATIONS, everywhere, with_positions
from banyan.families.names import NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig

_SKIPPED = 2


def _opt(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    for key, value in (
        ("do_layer_norm_before", True),
        ("layer_norm_elementwise_affine", True),
        ("_remove_final_layer_norm", False),
    ):
        if fields.flag(key, default=value) != value:
            raise fields.error(key, fields.any(key), "true" if value else "false")
    width = fields.any("word_embed_proj_dim")
    if width not in (None, model_config.hidden_size):
        raise fields.error("word_embed_proj_dim", width, f"{model_config.hidden_size}")
    return with_positions(fields, model_config, _SKIPPED)


def _opt_biases(fields: CheckpointFields) -> Biases:
    return Biases(*[fields.flag("enable_bias", default=True)] * 3)


def _names(body: str, norm: str) -> Mapping[str, str]:
    layer = f"{body}.layers.{{}}."
    return {
        f"{body}.embed_tokens": "embedding",
        f"{body}.embed_positions": "positions",
        f"{body}.{norm}": "norm",
        "lm_head": "head",
        "output_projection": "head",
        layer + "self_attn_layer_norm": "layers.{}.attention_norm",
        layer + "self_attn.q_proj": "layers.{}.attention.qkv:q",
        layer + "self_attn.k_proj": "layers.{}.attention.qkv:k",
        layer + "self_attn.v_proj": "layers.{}.attention.qkv:v",
        layer + "self_attn.out_proj": "layers.{}.attention.out",
        layer + "final_layer_norm": "layers.{}.mlp_norm",
        layer + "fc1": "layers.{}.mlp.up",
        layer + "fc2": "layers.{}.mlp.down",
    }


OPT = Family(
    hub=HubForm(
        eps_key="layer_norm_eps",
        eps=1e-5,
        activation_key="activation_function",
        activation="relu",
        activations=PLAIN_ACTIVATIONS,
        tied=True,
        respelled=partial(renamed, keys={"ffn_dim": "intermediate_size"}),
        biases=_opt_biases,
        more=_opt,
    ),
    names={"safetensors": NameMap(_names("model.decoder", "final_layer_norm"))},
    norm="layer+bias",
    gated=False,
)


def _scaled(fields: CheckpointFields, model_config: ModelConfig, positions: str) -> ModelConfig:
    """The norms' eps is not the configuration's."""
    is_scaled = fields.flag("scale_embedding", default=True)
    return replace(
        with_positions(fields, model_config, _SKIPPED),
        positions=positions,
        embedding_scale=model_config.hidden_size**0.5 if is_scaled else 1.0,
        norm_eps=1e-5,
    )


BIOGPT = replace(
    OPT,
    hub=HubForm(
        activation="gelu",
        activations=PLAIN_ACTIVATIONS,
        tied=True,
        biases=everywhere,
        more=partial(_scaled, positions="learned"),
    ),
    names={"safetensors": NameMap(_names("biogpt", "layer_norm"))},
)

_XGLM_KEYS = {
    "d_model": "hidden_size",
    "attention_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "ffn_dim": "intermediate_size",
}
XGLM = replace(
    OPT,
    hub=HubForm(
        activation_key="activation_function",
        activation="gelu",
        activations=PLAIN_ACTIVATIONS,
        tied=True,
        respelled=partial(renamed, keys=_XGLM_KEYS),
        biases=everywhere,
        more=partial(_scaled, positions="sinusoidal"),
    ),
    names={
        "safetensors": NameMap(
            _names("model", "layer_norm"), ignored=("model.embed_positions.weights",)
        )
    },
)
