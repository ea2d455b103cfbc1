"""BLOOM (arXiv 2211.05100), MPT and Falcon (arXiv 2311.16867): layer norms, feed-forward blocks
without a gate, and ALiBi in place of positions; Falcon has RoPE as a rule.

BLOOM norms its embeddings. Falcon: attention and feed-forward are parallel, with one norm or two.
Source: the published configurations of bigscience/bloom, mosaicml/mpt-7b and tiiuae/falcon.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from banyan.families.base import GELU_TANH, MAX_LENGTH, Biases, Family, GgufForm, HubForm
from banyan.families.gpt import GGUF_FUSED, PLAIN_ACTIVATIONS, bare_too, everywhere, with_inner
from banyan.families.names import NameMap
from banyan.families.olmo import limit_of
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig, RopeFacts

_NO_ROPE = RopeFacts(kind="none")


def _bloom(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    if fields.flag("apply_residual_connection_post_layernorm", default=False):
        raise fields.error("apply_residual_connection_post_layernorm", True, "false")
    return replace(model_config, alibi=1.0, rope=_NO_ROPE)


_BLOOM_KEYS = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "seq_length": "max_position_embeddings",
}
_LAYER = "transformer.h.{}."
_QKV = _LAYER + "self_attention.query_key_value"
_BLOOM = {
    "transformer.word_embeddings": "embedding",
    "transformer.word_embeddings_layernorm": "embedding_norm",
    "transformer.ln_f": "norm",
    "lm_head": "head",
    _LAYER + "input_layernorm": "layers.{}.attention_norm",
    _LAYER + "ln_attn": "layers.{}.attention_norm",
    _LAYER + "post_attention_layernorm": "layers.{}.mlp_norm",
    _LAYER + "ln_mlp": "layers.{}.mlp_norm",
    _QKV: "layers.{}.attention.qkv:q+k+v",
    _LAYER + "self_attention.dense": "layers.{}.attention.out",
    _LAYER + "mlp.dense_h_to_4h": "layers.{}.mlp.up",
    _LAYER + "mlp.dense_4h_to_h": "layers.{}.mlp.down",
}
_GROUPED = tuple(bare_too({_QKV: ""}))
BLOOM = Family(
    hub=HubForm(
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        activation=GELU_TANH,
        tied=True,
        respelled=partial(with_inner, keys=_BLOOM_KEYS, inner="n_inner"),
        biases=everywhere,
        more=_bloom,
    ),
    gguf=GgufForm("BloomForCausalLM", GELU_TANH, "attention.layer_norm_epsilon", more=_bloom),
    names={
        "safetensors": NameMap(bare_too(_BLOOM), grouped=_GROUPED),
        "gguf": NameMap(GGUF_FUSED),
    },
    norm="layer+bias",
    embedding_norm=True,
    gated=False,
)


def _mpt(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    model_config = replace(model_config, alibi=1.0, rope=_NO_ROPE)
    if not fields.flag("no_bias", default=True):
        raise fields.error("no_bias", False, "true")
    if fields.has("logit_scale"):
        raise fields.error("logit_scale", fields.any("logit_scale"), "null")
    own = fields.part("attn_config")
    if own is None:
        return model_config
    for key, value in (("alibi", True), ("qk_ln", False), ("prefix_lm", False)):
        if own.flag(key, default=value) != value:
            raise own.error(key, not value, "true" if value else "false")
    scale = own.number("softmax_scale", 1e-6, 1e6) if own.has("softmax_scale") else 0.0
    return replace(model_config, attention_scale=scale, qkv_limit=limit_of(own))


_MPT_KEYS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
}
_BLOCK = "transformer.blocks.{}."
MPT = Family(
    hub=HubForm(
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        activation="gelu",
        tied=True,
        respelled=partial(with_inner, keys=_MPT_KEYS, inner="ffn_hidden_size"),
        biases=lambda fields: Biases(),
        more=_mpt,
    ),
    names={
        "safetensors": NameMap(
            {
                "transformer.wte": "embedding",
                "transformer.norm_f": "norm",
                "lm_head": "head",
                _BLOCK + "norm_1": "layers.{}.attention_norm",
                _BLOCK + "attn.Wqkv": "layers.{}.attention.qkv:q+k+v",
                _BLOCK + "attn.out_proj": "layers.{}.attention.out",
                _BLOCK + "norm_2": "layers.{}.mlp_norm",
                _BLOCK + "ffn.up_proj": "layers.{}.mlp.up",
                _BLOCK + "ffn.down_proj": "layers.{}.mlp.down",
            }
        )
    },
    norm="layer",
    gated=False,
)


def _falcon_keys(fields: CheckpointFields) -> Mapping[str, object]:
    """The number of KV heads counts only in the new architecture, or without multi-query."""
    values = with_inner(fields, _BLOOM_KEYS, "ffn_hidden_size")
    heads = fields.with_values(values).integer("num_attention_heads", 1, MAX_LENGTH)
    kv_heads = fields.any("num_kv_heads") or heads
    if not fields.flag("new_decoder_architecture", default=False):
        kv_heads = 1 if fields.flag("multi_query", default=True) else heads
    return {**values, "num_key_value_heads": kv_heads}


def _falcon(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    norms = fields.any("num_ln_in_parallel_attn")
    if fields.flag("new_decoder_architecture", default=False):
        parallel = "one norm" if norms == 1 else "two norms"
    else:
        parallel = "one norm" if fields.flag("parallel_attn", default=True) else ""
    model_config = replace(model_config, parallel=parallel)
    if not fields.flag("alibi", default=False):
        return model_config
    return replace(model_config, alibi=model_config.head_dim**-0.5, rope=_NO_ROPE)


FALCON = Family(
    hub=HubForm(
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        activation_key="activation",
        activation="gelu",
        activations=PLAIN_ACTIVATIONS,
        tied=True,
        respelled=_falcon_keys,
        biases=lambda fields: Biases(*[fields.flag("bias", default=False)] * 3),
        more=_falcon,
    ),
    names={"safetensors": NameMap(_BLOOM, grouped=(_QKV,))},
    norm="layer+bias",
    gated=False,
)
