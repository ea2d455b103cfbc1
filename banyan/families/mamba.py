"""Mamba-2, and hybrids of Mamba-2 and attention: Bamba, Granite 4 (with or without experts), and
Falcon-H1, which has both in every layer.

Source: the documented fields and defaults of the families' configuration classes. Bamba's GGUF
files are "granitehybrid" too; rope.scaling.finetuned marks files whose attention uses RoPE.
"""

import math
from collections.abc import Container
from dataclasses import replace

from banyan.families.base import (
    MAX_WIDTH,
    Family,
    GgufForm,
    HubForm,
    Kinds,
    kinds_by_heads,
    state_where,
)
from banyan.families.experts import gguf_softmax, mixtral_experts
from banyan.families.granite import of_gguf as granite_gguf
from banyan.families.granite import of_hub as granite
from banyan.families.lfm import MAX_CONV_KERNEL
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    HUB_GRANITE_EXPERTS,
    HUB_NAMES,
    QK,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import BOTH, FULL, STATE, ModelConfig, RopeFacts, StateFacts

MAX_HEADS = 4096
_MAX_STEP = 1e9
_NAMES = {
    "mamba": STATE,
    "linear_attention": STATE,
    "attention": FULL,
    "full_attention": FULL,
}
"""Names of the kinds in layer lists, in older and newer files."""

MIXER_PARTS = {
    "in_proj": "mix:z+x+b+c+dt",
    "conv1d": "conv:x+b+c",
    "dt_bias": "gates.bias",
    "A_log": "gates.rate",
    "D": "gates.skip",
    "norm": "norm",
    "out_proj": "out",
}


def _mixer(module: str) -> dict[str, str]:
    """Weight names of a Mamba-2 layer named `module`."""
    return {f"{module}.{name}": f"layers.{{}}.attention.{to}" for name, to in MIXER_PARTS.items()}


_MIXER = _mixer("model.layers.{}.mamba")


def state_of(fields: CheckpointFields, model_config: ModelConfig) -> StateFacts:
    inner = fields.integer("mamba_expand", 1, 64, default=2) * model_config.hidden_size
    inner = fields.integer("mamba_d_ssm", 1, MAX_WIDTH, default=inner)
    heads = fields.integer("mamba_n_heads", 1, MAX_HEADS, default=128)
    groups = fields.integer("mamba_n_groups", 1, MAX_HEADS, default=1)
    given = fields.any("mamba_d_head")
    value_dim = inner // heads
    if inner % heads or given not in (None, "auto", value_dim):
        raise fields.error("mamba_d_head", given, f"{inner} inner numbers / {heads} heads")
    if heads % groups:
        raise fields.error("mamba_n_heads", heads, f"a multiple of {groups} groups")
    least, most = limits_of(fields)
    return StateFacts(
        mixer="scan",
        conv_kernel=fields.integer("mamba_d_conv", 2, MAX_CONV_KERNEL, default=4),
        has_conv_bias=fields.flag("mamba_conv_bias", default=True),
        has_bias=fields.flag("mamba_proj_bias", default=False),
        heads=heads,
        key_heads=groups,
        key_dim=fields.integer("mamba_d_state", 1, MAX_WIDTH, default=256),
        value_dim=value_dim,
        least_step=least,
        most_step=most,
    )


def _mamba2(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """A pure Mamba-2 model, which has its own keys."""
    heads, value_dim = model_config.num_heads, fields.integer("head_dim", 1, MAX_WIDTH, default=64)
    inner = fields.integer("expand", 1, 64, default=2) * model_config.hidden_size
    groups = fields.integer("n_groups", 1, MAX_HEADS, default=8)
    if heads * value_dim != inner:
        raise fields.error("head_dim", value_dim, f"{inner} inner numbers / {heads} heads")
    if heads % groups:
        raise fields.error("n_groups", groups, f"a divisor of {heads} heads")
    state = scan_of(fields, (heads, groups), "state_size", value_dim)
    return replace(model_config, state=state, rope=RopeFacts(kind="none"))


def scan_of(
    fields: CheckpointFields, heads: tuple[int, int], width_key: str, value_dim: int
) -> StateFacts:
    """A Mamba-2 mixer from the keys that Mamba-2 and Nemotron-H share.

    Args:
        heads: number of heads, number of groups.
        width_key: key of the state's width.
    """
    least, most = limits_of(fields)
    return StateFacts(
        mixer="scan",
        conv_kernel=fields.integer("conv_kernel", 2, MAX_CONV_KERNEL, default=4),
        has_conv_bias=fields.flag("use_conv_bias", default=True),
        has_bias=fields.flag("use_bias", default=False),
        heads=heads[0],
        key_heads=heads[1],
        key_dim=fields.integer(width_key, 1, MAX_WIDTH, default=128),
        value_dim=value_dim,
        least_step=least,
        most_step=most,
    )


def limits_of(fields: CheckpointFields) -> tuple[float, float]:
    """Bounds of the time step. Infinity may be written as a JSON text or object."""
    listed = fields.listed("time_step_limit")
    if not listed:
        return 0.0, math.inf
    numbers = [
        math.inf if not isinstance(value, int | float) or value > _MAX_STEP else float(value)
        for value in listed
    ]
    if len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
        raise fields.error("time_step_limit", listed, "a lower and an upper bound")
    return numbers[0], numbers[1]


def _bamba_kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    full = fields.listed("attn_layer_indices")
    kinds = state_where(
        fields,
        num_layers,
        _NAMES,
        lambda at: FULL if at in full else STATE,
        key="layers_block_type",
    )
    return kinds, 0


def _granite_kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    key = "layer_types" if fields.has("layer_types") else "layers_block_type"
    return state_where(fields, num_layers, _NAMES, lambda at: STATE, key=key), 0


def _bamba(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return replace(model_config, state=state_of(fields, model_config))


def _granite(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    model_config = replace(granite(fields, model_config), state=state_of(fields, model_config))
    if fields.any("position_embedding_type") != "rope":
        model_config = replace(model_config, rope=RopeFacts(kind="none"))
    shared = fields.integer("shared_intermediate_size", 1, MAX_WIDTH, default=1024)
    if not fields.integer("num_local_experts", 0, 1 << 16, default=8):
        return replace(model_config, intermediate_size=shared)
    return replace(
        model_config, experts=replace(mixtral_experts(fields, model_config), shared_inner=shared)
    )


def _falcon(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Falcon-H1 scales nearly everything by constants.

    A factor on a projection's input is applied to its output, and the keys' factor to q·k.
    """

    def factor(key: str) -> float:
        return fields.number(key, 1e-9, 1e9, default=1.0)

    into, steps = factor("attention_in_multiplier"), factor("ssm_in_multiplier")
    gate, down = _several(fields, "mlp_multipliers", 2)
    of_state = _several(fields, "ssm_multipliers", 5)
    state = state_of(fields, model_config)
    if fields.flag("projectors_bias", default=False) != state.has_bias:
        raise fields.error("projectors_bias", not state.has_bias, "the same as mamba_proj_bias")
    for key, has_bias, scale in (
        ("attention_bias", model_config.attention_bias, into),
        ("mamba_proj_bias", state.has_bias, steps),
        ("mlp_bias", model_config.mlp_bias, down),
    ):
        if has_bias and scale != 1:
            raise fields.error(key, True, f"false with a multiplier of {scale:g}")
    norm = "plain" if fields.flag("mamba_norm_before_gate", default=True) else "gated"
    state = replace(
        state,
        norm=norm if fields.flag("mamba_rms_norm", default=False) else "",
        factors=tuple(steps * value for value in of_state),
        factor=factor("ssm_out_multiplier"),
    )
    return replace(
        model_config,
        state=state,
        embedding_scale=factor("embedding_multiplier"),
        logit_scale=factor("lm_head_multiplier"),
        attention_scale=model_config.head_dim**-0.5 * into**2 * factor("key_multiplier"),
        attention_factor=into * factor("attention_out_multiplier"),
        gate_factor=gate,
        up_factor=down,
    )


def _several(fields: CheckpointFields, key: str, count: int) -> tuple[float, ...]:
    """`count` factors; default 1."""
    listed = fields.listed(key) or [1.0] * count
    good = [float(v) for v in listed if isinstance(v, int | float) and 1e-9 <= v <= 1e9]
    if len(good) != count or len(listed) != count:
        raise fields.error(key, listed, f"{count} numbers above 0")
    return tuple(good)


def _of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    heads = fields.integer("ssm.time_step_rank", 1, MAX_HEADS)
    inner = fields.integer("ssm.inner_size", 1, MAX_WIDTH)
    groups = fields.integer("ssm.group_count", 1, MAX_HEADS, default=1)
    if inner % heads or heads % groups:
        raise fields.error("ssm.time_step_rank", heads, f"a divisor of {inner}, of {groups} groups")
    state = StateFacts(
        mixer="scan",
        conv_kernel=fields.integer("ssm.conv_kernel", 2, MAX_CONV_KERNEL),
        heads=heads,
        key_heads=groups,
        key_dim=fields.integer("ssm.state_size", 1, MAX_WIDTH),
        value_dim=inner // heads,
    )
    return replace(model_config, state=state)


def state_of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Mamba-2; attention layers, if any, have no RoPE."""
    return replace(_of_gguf(fields, model_config), rope=RopeFacts(kind="none"), rotary_dim=0)


def _granite_of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    model_config = granite_gguf(fields, model_config)
    turned = model_config.rotary_dim or model_config.head_dim
    if not fields.flag("rope.scaling.finetuned", default=False):
        model_config = state_of_gguf(fields, model_config)
    elif turned != model_config.head_dim:
        # Converters sort the rows of whole heads into pairs, whatever part of them rotates.
        raise fields.error("rope.dimension_count", turned, f"{model_config.head_dim}, a whole head")
    else:
        model_config = _of_gguf(fields, model_config)
    if fields.integer("expert_count", 0, 1 << 16, default=0) < 2:
        return model_config
    return replace(model_config, experts=gguf_softmax(fields, model_config))


def of_tensors(names: Container[str], model_config: ModelConfig) -> ModelConfig:
    """Find the biases and norms of the layers with states."""
    at, state = biases_of_tensors(names, model_config)
    norm = "gated" if f"blk.{at}.ssm_norm.weight" in names else ""
    return replace(model_config, state=replace(state, norm=norm))


def biases_of_tensors(names: Container[str], model_config: ModelConfig) -> tuple[int, StateFacts]:
    """The first layer with a state, and the StateFacts with its biases."""
    assert model_config.state is not None
    at = next(at for at in range(model_config.num_layers) if STATE in model_config.kept_by(at))
    has_conv_bias = f"blk.{at}.ssm_conv1d.bias" in names
    has_bias = f"blk.{at}.ssm_in.bias" in names
    return at, replace(model_config.state, has_conv_bias=has_conv_bias, has_bias=has_bias)


_GGUF_PARTS = {
    "ssm_in": "mix:z+x+b+c+dt",
    "ssm_conv1d": "conv",
    "ssm_dt.bias": "gates.bias",
    "ssm_a": "gates.rate",
    "ssm_d": "gates.skip",
    "ssm_norm": "norm",
    "ssm_out": "out",
}


def gguf_mixer(place: str) -> dict[str, str]:
    return {f"blk.{{}}.{name}": f"layers.{{}}.{place}.{to}" for name, to in _GGUF_PARTS.items()} | {
        "blk.{}.ssm_conv1d": f"layers.{{}}.{place}.conv:x+b+c",
    }


FEED_FORWARD = {
    "model.layers.{}.pre_ff_layernorm": "layers.{}.mlp_norm",
    "model.layers.{}.feed_forward.gate_proj": "layers.{}.mlp.gate_up:gate",
    "model.layers.{}.feed_forward.up_proj": "layers.{}.mlp.gate_up:up",
    "model.layers.{}.feed_forward.down_proj": "layers.{}.mlp.down",
    "model.final_layernorm": "norm",
}
"""Names of feed-forward blocks that several families share."""

FALCON_H1 = Family(
    hub=HubForm(
        eps=1e-5,
        context=8192,
        kinds=lambda fields, num_layers: ((BOTH,) * num_layers, 0),
        more=_falcon,
    ),
    gguf=GgufForm(
        "FalconH1ForCausalLM",
        kinds=lambda fields, num_layers: ((BOTH,) * num_layers, 0),
        more=_of_gguf,
        of_tensors=of_tensors,
    ),
    names={
        "gguf": NameMap(
            GGUF_NAMES
            | gguf_mixer("state")
            | {f"blk.{{}}.ffn_norm{end}": "layers.{}.mlp_norm.weight" for end in ("", ".weight")}
        ),
        "safetensors": NameMap(
            HUB_NAMES
            | {
                f"model.layers.{{}}.mamba.{name}": f"layers.{{}}.state.{to}"
                for name, to in MIXER_PARTS.items()
            }
            | FEED_FORWARD
        ),
    },
)

MAMBA2 = Family(
    hub=HubForm(
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        heads_key="num_heads",
        head_dim=64,
        context=1 << 17,
        inner_keys=(),
        kinds=lambda fields, num_layers: ((STATE,) * num_layers, 0),
        more=_mamba2,
    ),
    gguf=GgufForm(
        "Mamba2ForCausalLM",
        kinds=lambda fields, num_layers: ((STATE,) * num_layers, 0),
        more=state_of_gguf,
        of_tensors=of_tensors,
    ),
    names={
        "gguf": NameMap(GGUF_NAMES | gguf_mixer("attention")),
        "safetensors": NameMap(
            _mixer("backbone.layers.{}.mixer")
            | {
                "backbone.embeddings": "embedding",
                "backbone.layers.{}.norm": "layers.{}.attention_norm",
                "backbone.norm_f": "norm",
                "lm_head": "head",
            }
        ),
    },
)

BAMBA = Family(
    hub=HubForm(eps=1e-5, rotary=0.5, kinds=_bamba_kinds, more=_bamba),
    names={"safetensors": NameMap(HUB_NAMES | _MIXER | FEED_FORWARD)},
)

GRANITE_HYBRID = Family(
    hub=HubForm(kinds=_granite_kinds, more=_granite),
    gguf=GgufForm(
        "GraniteMoeHybridForCausalLM",
        kinds=kinds_by_heads,
        more=_granite_of_gguf,
        of_tensors=of_tensors,
    ),
    names={
        "gguf": NameMap(GGUF_NAMES | GGUF_EXPERTS | gguf_mixer("attention"), paired=QK),
        "safetensors": NameMap(
            HUB_NAMES
            | _MIXER
            | HUB_GRANITE_EXPERTS
            | {
                "model.layers.{}.shared_mlp.input_linear": "layers.{}.mlp.shared.gate_up:gate+up",
                "model.layers.{}.shared_mlp.output_linear": "layers.{}.mlp.shared.down",
            },
            optional_part=".shared",
        ),
    },
)
