"""GPT-2 (Radford et al. 2019) and its relatives: layer norms with bias, feed-forward blocks without
a gate, and a learned vector per position or RoPE on part of each head.

GPT-2: matrices are stored [in, out]. GPT-BigCode (SantaCoder, StarCoder 1): one KV head. GPT-Neo:
windows in every second layer, attention without a scale. GPT-J and CodeGen: parallel attention and
feed-forward, RoPE in pairs 2i, 2i + 1. GPT-NeoX (Pythia, arXiv 2304.01373): parallel, two norms.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from banyan.families.base import (
    GELU_TANH,
    MAX_LENGTH,
    MAX_WIDTH,
    Biases,
    Family,
    GgufForm,
    HubForm,
    Kinds,
    renamed,
)
from banyan.families.names import GGUF_NAMES, QK, NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import FULL, WINDOW, ModelConfig, RopeFacts

PLAIN_ACTIVATIONS = (GELU_TANH, "gelu", "relu", "silu")
GGUF_FUSED = GGUF_NAMES | {
    "blk.{}.attn_qkv": "layers.{}.attention.qkv:q+k+v",
    "blk.{}.ffn_up": "layers.{}.mlp.up",
    "position_embd": "positions",
    "token_embd_norm": "embedding_norm",
}
"""One tensor for q, k, v, and feed-forward blocks without a gate."""
_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}
_HEAD = "transformer."


def with_inner(
    fields: CheckpointFields, keys: Mapping[str, str], inner: str
) -> Mapping[str, object]:
    """The usual keys; without an inner width it is four times the hidden size.

    Args:
        inner: the family's key of the inner width.
    """
    values = dict(renamed(fields, keys))
    size = fields.with_values(values).integer("hidden_size", 1, MAX_WIDTH)
    given = fields.any(inner)
    return values | {"intermediate_size": 4 * size if given is None else given}


def bare_too(names: Mapping[str, str], beginning: str = _HEAD) -> dict[str, str]:
    """Names with and without the name of the body at their beginning."""
    return {**names, **{name.removeprefix(beginning): place for name, place in names.items()}}


def with_positions(
    fields: CheckpointFields, model_config: ModelConfig, skipped: int = 0
) -> ModelConfig:
    """A learned vector per position, and no rotation."""
    none = RopeFacts(kind="none")
    return replace(model_config, positions="learned", first_position=skipped, rope=none)


def _gpt2(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if fields.flag(key, default=False):
            raise fields.error(key, True, "false")
    scale = 0.0 if fields.flag("scale_attn_weights", default=True) else 1.0
    return replace(with_positions(fields, model_config), attention_scale=scale)


def _bigcode(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    has_one = fields.flag("multi_query", default=True)
    return replace(
        _gpt2(fields, model_config), num_kv_heads=1 if has_one else model_config.num_heads
    )


def everywhere(fields: CheckpointFields) -> Biases:
    return Biases(True, True, True)


_GPT2 = {
    "transformer.wte": "embedding",
    "transformer.wpe": "positions",
    "transformer.ln_f": "norm",
    "transformer.h.{}.ln_1": "layers.{}.attention_norm",
    "transformer.h.{}.attn.c_attn": "layers.{}.attention.qkv:q+k+v",
    "transformer.h.{}.attn.c_proj": "layers.{}.attention.out",
    "transformer.h.{}.ln_2": "layers.{}.mlp_norm",
    "transformer.h.{}.mlp.c_fc": "layers.{}.mlp.up",
    "transformer.h.{}.mlp.c_proj": "layers.{}.mlp.down",
    "lm_head": "head",
}
_MASKS = ("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias")
_IGNORED = (*_MASKS, *(name.removeprefix(_HEAD) for name in _MASKS))
_MATRICES = tuple(name for name in _GPT2 if "attn.c_" in name or "mlp.c_" in name)
_FORM = HubForm(
    eps_key="layer_norm_epsilon",
    eps=1e-5,
    activation_key="activation_function",
    activation=GELU_TANH,
    activations=PLAIN_ACTIVATIONS,
    tied=True,
    respelled=partial(with_inner, keys=_KEYS, inner="n_inner"),
    biases=everywhere,
    more=_gpt2,
)
GPT2 = Family(
    hub=_FORM,
    gguf=GgufForm(
        "GPT2LMHeadModel", GELU_TANH, "attention.layer_norm_epsilon", more=with_positions
    ),
    names={
        "safetensors": NameMap(
            bare_too(_GPT2),
            ignored=_IGNORED,
            transposed=tuple(bare_too(dict.fromkeys(_MATRICES, ""))),
        ),
        "gguf": NameMap(GGUF_FUSED),
    },
    norm="layer+bias",
    gated=False,
)

GPT_BIGCODE = replace(
    GPT2,
    hub=replace(_FORM, more=_bigcode),
    gguf=GgufForm(
        "GPTBigCodeForCausalLM", GELU_TANH, "attention.layer_norm_epsilon", more=with_positions
    ),
    names={
        "safetensors": NameMap(_GPT2, ignored=_IGNORED, grouped=("transformer.h.{}.attn.c_attn",)),
        "gguf": NameMap(GGUF_FUSED),
    },
)


def _neo_kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    names = {"global": FULL, "local": WINDOW}
    listed = fields.listed("attention_layers")
    kinds = tuple(names.get(str(name), "") for name in listed)
    if len(kinds) != num_layers or "" in kinds:
        raise fields.error("attention_layers", listed, f"{num_layers} of {', '.join(names)}")
    window = fields.integer("window_size", 1, MAX_LENGTH, default=256)
    return (kinds, window) if WINDOW in kinds else ((), 0)


def _neo(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return replace(with_positions(fields, model_config), attention_scale=1.0)


_NEO_KEYS = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
_NEO = "transformer.h.{}.attn.attention."
GPT_NEO = Family(
    hub=replace(
        _FORM,
        respelled=partial(with_inner, keys=_NEO_KEYS, inner="intermediate_size"),
        biases=lambda fields: Biases(False, True, True),
        kinds=_neo_kinds,
        more=_neo,
    ),
    names={
        "safetensors": NameMap(
            {name: place for name, place in _GPT2.items() if ".attn." not in name}
            | {
                _NEO + "q_proj": "layers.{}.attention.qkv:q",
                _NEO + "k_proj": "layers.{}.attention.qkv:k",
                _NEO + "v_proj": "layers.{}.attention.qkv:v",
                _NEO + "out_proj": "layers.{}.attention.out",
            },
            ignored=(_NEO + "bias", _NEO + "masked_bias"),
        )
    },
    norm="layer+bias",
    gated=False,
)


def _turned(fields: CheckpointFields) -> Mapping[str, object]:
    """The rotated part of a head is given in dimensions."""
    values = dict(with_inner(fields, _KEYS, "n_inner"))
    usual = fields.with_values(values)
    dim = usual.integer("hidden_size", 1, MAX_WIDTH) // usual.integer(
        "num_attention_heads", 1, MAX_WIDTH
    )
    turned = fields.integer("rotary_dim", 2, MAX_WIDTH, default=min(64, dim))
    if turned > max(dim, 1):
        raise fields.error("rotary_dim", turned, f"at most {dim}, the size of a head")
    return values | {"partial_rotary_factor": turned / max(dim, 1)}


def _with_head_bias(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return replace(model_config, head_bias=True)


_GPTJ = {
    "transformer.wte": "embedding",
    "transformer.ln_f": "norm",
    "transformer.h.{}.ln_1": "layers.{}.attention_norm",
    "transformer.h.{}.attn.q_proj": "layers.{}.attention.qkv:q",
    "transformer.h.{}.attn.k_proj": "layers.{}.attention.qkv:k",
    "transformer.h.{}.attn.v_proj": "layers.{}.attention.qkv:v",
    "transformer.h.{}.attn.qkv_proj": "layers.{}.attention.qkv:q+k+v",
    "transformer.h.{}.attn.out_proj": "layers.{}.attention.out",
    "transformer.h.{}.mlp.fc_in": "layers.{}.mlp.up",
    "transformer.h.{}.mlp.fc_out": "layers.{}.mlp.down",
    "lm_head": "head",
}
_CAUSAL = (*_MASKS, "transformer.h.{}.attn.causal_mask")
GPTJ = Family(
    hub=replace(
        _FORM,
        tied=False,
        respelled=_turned,
        biases=lambda fields: Biases(mlp=True),
        more=_with_head_bias,
    ),
    names={"safetensors": NameMap(_GPTJ, ignored=_CAUSAL, paired=QK)},
    norm="layer+bias",
    parallel="one norm",
    gated=False,
)
CODEGEN = replace(
    GPTJ,
    names={
        "safetensors": NameMap(
            _GPTJ,
            ignored=_CAUSAL,
            paired=QK,
            grouped=("transformer.h.{}.attn.qkv_proj",),
            shards=4,
        )
    },
)


def _neox(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    is_parallel = fields.flag("use_parallel_residual", default=True)
    return replace(model_config, parallel="two norms" if is_parallel else "")


def _neox_biases(fields: CheckpointFields) -> Biases:
    has_bias = fields.flag("attention_bias", default=True)
    return Biases(has_bias, has_bias, True)


_NEOX = "gpt_neox.layers.{}."
_NEOX_QKV = _NEOX + "attention.query_key_value"
GPT_NEOX = Family(
    hub=HubForm(
        eps_key="layer_norm_eps",
        eps=1e-5,
        activation="gelu",
        activations=PLAIN_ACTIVATIONS,
        rotary=0.25,
        respelled=partial(
            renamed, keys={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
        ),
        biases=_neox_biases,
        more=_neox,
    ),
    names={
        "safetensors": NameMap(
            {
                "gpt_neox.embed_in": "embedding",
                "gpt_neox.final_layer_norm": "norm",
                "embed_out": "head",
                _NEOX + "input_layernorm": "layers.{}.attention_norm",
                _NEOX + "post_attention_layernorm": "layers.{}.mlp_norm",
                _NEOX_QKV: "layers.{}.attention.qkv:q+k+v",
                _NEOX + "attention.dense": "layers.{}.attention.out",
                _NEOX + "mlp.dense_h_to_4h": "layers.{}.mlp.up",
                _NEOX + "mlp.dense_4h_to_h": "layers.{}.mlp.down",
            },
            ignored=tuple(
                _NEOX + "attention." + name
                for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
            ),
            grouped=(_NEOX_QKV,),
        )
    },
    norm="layer+bias",
    gated=False,
)
