"""Zamba2 (arXiv 2411.15242): Mamba-2, with an attention and feed-forward block before it in every
few layers. The model has one or two such blocks, whose weights these layers share.

Source: the documented fields and defaults of the family's configuration class. Time steps are at
least `time_step_min`, in prefill and in decode.
"""

import math
from dataclasses import replace

from banyan.families.base import MAX_WIDTH, Biases, Family, HubForm, Kinds, state_where
from banyan.families.lfm import MAX_CONV_KERNEL
from banyan.families.mamba import MAX_HEADS, MIXER_PARTS
from banyan.families.names import NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import (
    BOTH,
    STATE,
    ModelConfig,
    RopeFacts,
    SharedFacts,
    StateFacts,
)

_NORM_EPS = 1e-5
"""Eps of the norm after a state; no configuration states it."""
_MAX_STEP = 1e3
_DEFAULT = frozenset((*range(6, 48, 6), 47, 51))
"""Layers with a shared block if none are listed."""


def _kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    names = {"linear_attention": STATE, "mamba": STATE, "hybrid": BOTH}
    key = "layers_block_type"
    kinds = state_where(
        fields, num_layers, names, lambda at: BOTH if at in _DEFAULT else STATE, key=key
    )
    return kinds, 0


def _state(fields: CheckpointFields, model_config: ModelConfig) -> StateFacts:
    heads = fields.integer("n_mamba_heads", 1, MAX_HEADS, default=8)
    groups = fields.integer("mamba_ngroups", 1, MAX_HEADS, default=1)
    inner = fields.integer("mamba_expand", 1, 64, default=2) * model_config.hidden_size
    if heads % groups or inner % heads:
        raise fields.error("n_mamba_heads", heads, f"a divisor of {inner}, of {groups} groups")
    if not fields.flag("use_conv_bias", default=True):
        raise fields.error("use_conv_bias", False, "true")
    return StateFacts(
        mixer="scan",
        conv_kernel=fields.integer("mamba_d_conv", 2, MAX_CONV_KERNEL, default=4),
        has_conv_bias=True,
        has_bias=fields.flag("add_bias_linear", default=False),
        heads=heads,
        key_heads=groups,
        key_dim=fields.integer("mamba_d_state", 1, MAX_WIDTH, default=64),
        value_dim=inner // heads,
        least_step=fields.number("time_step_min", 0.0, _MAX_STEP, default=0.001),
        most_step=math.inf,
        norm_eps=_NORM_EPS,
    )


def _of_hub(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    heads, width = model_config.num_heads, 2 * model_config.hidden_size
    hybrid_layers = len(model_config.hybrid_layers)
    if not hybrid_layers:
        raise fields.error("layers_block_type", "no hybrid", "a list with a hybrid layer")
    if not model_config.tie_embeddings:  # transformers then builds a separate block for every layer
        raise fields.error(
            "tie_word_embeddings", False, "true: with the embedding, blocks are tied"
        )
    if fields.flag("use_long_context", default=False):
        raise fields.error("use_long_context", True, "false: its RoPE is not the same everywhere")
    shared = SharedFacts(
        blocks=fields.integer("num_mem_blocks", 1, hybrid_layers, default=1),
        rank=fields.integer("adapter_rank", 1, MAX_WIDTH, default=128),
        has_attention_adapters=fields.flag("use_shared_attention_adapter", default=False),
    )
    if shared.has_attention_adapters and model_config.num_kv_heads != heads:
        raise fields.error(
            "num_key_value_heads", model_config.num_kv_heads, f"{heads} with adapters"
        )
    inner = 4 * model_config.hidden_size
    model_config = replace(
        model_config,
        head_dim=width // heads,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH, default=inner),
        attention_scale=(width // heads / 2) ** -0.5,
        shared=shared,
        state=_state(fields, model_config),
    )
    if fields.flag("use_mem_rope", default=False):
        return model_config
    return replace(model_config, rope=RopeFacts(kind="none"))


_BLOCK = "model.shared.{}"
_LAYER = "model.layers.{}"
_ADAPTERS = {
    **{part: f"attention.qkv.{{}}.{part}" for part in "qkv"},
    "gate_up": "mlp.gate_up.{}.gate_up",
}


def _names() -> dict[str, str]:
    """Names after `models/weights/checkpoint_layouts.py` has numbered the shared blocks."""
    names = {
        "model.embed_tokens": "embedding",
        "model.final_layernorm": "norm",
        "lm_head": "head",
        f"{_LAYER}.input_layernorm": "layers.{}.attention_norm",
        f"{_LAYER}.mamba_decoder.input_layernorm": "layers.{}.attention_norm",
        f"{_LAYER}.linear": "layers.{}.shared.linear",
        f"{_BLOCK}.input_layernorm": "shared.{}.norm",
        f"{_BLOCK}.self_attn.o_proj": "shared.{}.out",
        f"{_BLOCK}.pre_ff_layernorm": "shared.{}.mlp_norm",
        f"{_BLOCK}.feed_forward.gate_up_proj": "shared.{}.gate_up:gate+up",
        f"{_BLOCK}.feed_forward.down_proj": "shared.{}.down",
    }
    names |= {f"{_BLOCK}.self_attn.{part}_proj": f"shared.{{}}.qkv:{part}" for part in "qkv"}
    for name, to in MIXER_PARTS.items():
        for mixer in ("mamba", "mamba_decoder.mamba"):
            names[f"{_LAYER}.{mixer}.{name}"] = f"layers.{{}}.attention.{to}"
    for name, place in _ADAPTERS.items():
        parts = ":gate+up" if name == "gate_up" else f":{name}"
        names[f"{_LAYER}.beside.{name}.into"] = f"layers.{{}}.shared.{place.format('into')}"
        names[f"{_LAYER}.beside.{name}.back"] = f"layers.{{}}.shared.{place.format('back')}{parts}"
    return names


ZAMBA2 = Family(
    hub=HubForm(
        eps=1e-5,
        context=4096,
        activation="gelu",
        tied=True,
        inner_keys=(),
        biases=lambda fields: Biases(mlp=fields.flag("add_bias_linear", default=False)),
        kinds=_kinds,
        more=_of_hub,
    ),
    names={"safetensors": NameMap(_names())},
    has_single_parts=True,
)
