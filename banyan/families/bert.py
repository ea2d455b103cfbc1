"""BERT (arXiv 1810.04805) and RoBERTa / XLM-R, which differ in names and in how positions count.
ModernBERT (arXiv 2412.13663): a decoder's layers whose tokens see both ways."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from banyan.families.base import Biases, Family, HubForm, window_listed
from banyan.families.names import NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig, RopeFacts

_BODY = {
    "embeddings.word_embeddings": "embedding",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "segments",
    "embeddings.LayerNorm": "norm",
    "encoder.layer.{}.attention.self.query": "layers.{}.attention.qkv:q",
    "encoder.layer.{}.attention.self.key": "layers.{}.attention.qkv:k",
    "encoder.layer.{}.attention.self.value": "layers.{}.attention.qkv:v",
    "encoder.layer.{}.attention.output.dense": "layers.{}.attention.out",
    "encoder.layer.{}.attention.output.LayerNorm": "layers.{}.attention_norm",
    "encoder.layer.{}.intermediate.dense": "layers.{}.mlp.up",
    "encoder.layer.{}.output.dense": "layers.{}.mlp.down",
    "encoder.layer.{}.output.LayerNorm": "layers.{}.mlp_norm",
    "pooler.dense": "head.dense",
}
_NEEDLESS = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids")
"""Some checkpoints keep 0, 1, 2 … among their weights."""


def _encoder(fields: CheckpointFields, model_config: ModelConfig, has_offset: bool) -> ModelConfig:
    """RoBERTa's positions begin at the padding id plus one."""
    if fields.text("position_embedding_type", default="absolute") != "absolute":
        raise fields.error(
            "position_embedding_type", fields.any("position_embedding_type"), "absolute"
        )
    first = (1 if model_config.pad_id is None else model_config.pad_id) + 1 if has_offset else 0
    if first >= model_config.context_length:
        raise fields.error("max_position_embeddings", model_config.context_length, f"above {first}")
    return replace(
        model_config,
        is_encoder=True,
        tie_embeddings=False,
        rope=RopeFacts(kind="none"),
        num_segments=fields.integer("type_vocab_size", 1, 16, default=2),
        first_position=first,
        context_length=model_config.context_length - first,
    )


def _family(prefix: str, head: dict[str, str], has_offset: bool) -> Family:
    """A family whose weights are named with or without `prefix` (models with a head use it)."""
    modules = {start + name: place for start in ("", prefix) for name, place in _BODY.items()}
    ignored = tuple(start + name for start in ("", prefix) for name in _NEEDLESS)
    form = HubForm(
        eps_key="layer_norm_eps",
        eps=1e-12,
        activation="gelu",
        biases=lambda fields: Biases(True, True, True),
        kinds=lambda fields, num_layers: ((), 0),
        more=partial(_encoder, has_offset=has_offset),
    )
    return Family(form, names={"safetensors": NameMap(modules | head, ignored)}, norm="layer+bias")


BERT = _family("bert.", {"classifier": "head.out"}, has_offset=False)
ROBERTA = _family(
    "roberta.",
    {"classifier.dense": "head.dense", "classifier.out_proj": "head.out"},
    has_offset=True,
)


def _modern_keys(fields: CheckpointFields) -> Mapping[str, object]:
    """A window counts both sides without the token; older configurations name a period."""
    sides = fields.integer("local_attention", 2, 1 << 20, default=128)
    found: dict[str, object] = {"sliding_window": sides // 2 + 1}
    if not fields.has("rope_parameters"):
        found["rope_theta"] = fields.number("global_rope_theta", 1.0, 1e12, default=160000.0)
        found["rope_local_base_freq"] = fields.number("local_rope_theta", 1.0, 1e12, default=1e4)
    if not fields.has("layer_types"):
        period = fields.integer("global_attn_every_n_layers", 1, 1 << 10, default=3)
        count = fields.integer("num_hidden_layers", 1, 1 << 10)
        found["layer_types"] = [
            "sliding_attention" if layer % period else "full_attention" for layer in range(count)
        ]
    return found


def _modern(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    if fields.flag("norm_bias", default=False):
        raise fields.error("norm_bias", True, "false")
    return replace(model_config, is_encoder=True, tie_embeddings=False)


MODERN_BERT = Family(
    hub=HubForm(
        eps_key="norm_eps",
        eps=1e-5,
        activation_key="hidden_activation",
        activation="gelu",
        rope_theta=160000.0,
        window_theta=10000.0,
        respelled=_modern_keys,
        kinds=window_listed,
        more=_modern,
    ),
    names={
        "safetensors": NameMap(
            {
                "embeddings.tok_embeddings": "embedding",
                "embeddings.norm": "layers.0.attention_norm",
                "layers.{}.attn_norm": "layers.{}.attention_norm",
                "layers.{}.attn.Wqkv": "layers.{}.attention.qkv:q+k+v",
                "layers.{}.attn.Wo": "layers.{}.attention.out",
                "layers.{}.mlp_norm": "layers.{}.mlp_norm",
                "layers.{}.mlp.Wi": "layers.{}.mlp.gate_up:gate+up",
                "layers.{}.mlp.Wo": "layers.{}.mlp.down",
                "final_norm": "norm",
            }
        )
    },
    norm="layer",
    starts_normed=True,
)
