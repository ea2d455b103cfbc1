"""Whisper (arXiv 2212.04356): its decoder. The encoder is a tower (`models/towers/sound.py`), which
also makes the keys and values that the decoder's cross attention reads.
"""

from collections.abc import Mapping
from dataclasses import replace

from banyan.families.base import Biases, Family, HubForm
from banyan.families.names import NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig, RopeFacts

_BLOCK, _MINE = "model.decoder.layers.{}.", "layers.{}."
_DECODER = {
    "model.decoder.embed_tokens": "embedding",
    "model.decoder.embed_positions": "positions",
    "model.decoder.layer_norm": "norm",
    f"{_BLOCK}self_attn_layer_norm": f"{_MINE}attention_norm",
    f"{_BLOCK}self_attn.q_proj": f"{_MINE}attention.q",
    f"{_BLOCK}self_attn.k_proj": f"{_MINE}attention.k",
    f"{_BLOCK}self_attn.v_proj": f"{_MINE}attention.v",
    f"{_BLOCK}self_attn.out_proj": f"{_MINE}attention.out",
    f"{_BLOCK}encoder_attn_layer_norm": f"{_MINE}cross_norm",
    f"{_BLOCK}encoder_attn.q_proj": f"{_MINE}cross.q",
    f"{_BLOCK}encoder_attn.out_proj": f"{_MINE}cross.out",
    f"{_BLOCK}final_layer_norm": f"{_MINE}mlp_norm",
    f"{_BLOCK}fc1": f"{_MINE}mlp.up",
    f"{_BLOCK}fc2": f"{_MINE}mlp.down",
    "proj_out": "head",
}

_SIZES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
    "max_position_embeddings": "max_target_positions",
    "hidden_act": "activation_function",
}
"""Usual key -> Whisper's."""


def _respelled(fields: CheckpointFields) -> Mapping[str, object]:
    return {usual: fields.any(own) for usual, own in _SIZES.items()}


def _without_rotation(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Positions are learned."""
    if fields.flag("scale_embedding", default=False):
        raise fields.error("scale_embedding", True, "false, as in every Whisper model")
    return replace(model_config, rope=RopeFacts(kind="none"), norm_eps=1e-5)


WHISPER = Family(
    HubForm(
        activation="gelu",
        tied=True,
        respelled=_respelled,
        biases=lambda fields: Biases(True, True, True),
        kinds=lambda fields, num_layers: ((), 0),
        more=_without_rotation,
    ),
    names={"safetensors": NameMap(_DECODER)},
    norm="layer+bias",
    gated=False,
)
