"""Mamba (arXiv 2312.00752), and Jamba (arXiv 2403.19887): Mamba with attention (without RoPE) in a
few layers and experts every few layers.

Source: the documented fields and defaults of the families' configuration classes.
"""

from collections.abc import Container
from dataclasses import replace

from banyan.families.base import MAX_WIDTH, Family, GgufForm, HubForm, Kinds, kinds_by_heads
from banyan.families.experts import MAX_EXPERTS, gguf_experts
from banyan.families.lfm import MAX_CONV_KERNEL
from banyan.families.mamba import FEED_FORWARD, biases_of_tensors
from banyan.families.names import GGUF_EXPERTS, GGUF_NAMES, HUB_NAMES, NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import (
    FULL,
    STATE,
    ExpertFacts,
    ModelConfig,
    RopeFacts,
    StateFacts,
)

_MAX_PERIOD = 1 << 16
_PARTS = {
    "in_proj": "mix:x+z",
    "conv1d": "conv",
    "x_proj": "made",
    "dt_proj.weight": "steps.weight",
    "dt_proj.bias": "rates.bias",
    "A_log": "rates.rate",
    "D": "rates.skip",
    "out_proj": "out",
}


def _mixer(module: str) -> dict[str, str]:
    return {f"{module}.{name}": f"layers.{{}}.attention.{to}" for name, to in _PARTS.items()}


def _rank(fields: CheckpointFields, model_config: ModelConfig, key: str) -> int:
    """Rank of the time step projection."""
    if fields.any(key) in (None, "auto"):
        return -(-model_config.hidden_size // 16)
    return fields.integer(key, 1, MAX_WIDTH)


def _where(fields: CheckpointFields, name: str, period: int, offset: int) -> tuple[int, int]:
    """Period and offset of the layers with `name`."""
    period = fields.integer(f"{name}_layer_period", 1, _MAX_PERIOD, default=period)
    return period, fields.integer(f"{name}_layer_offset", 0, period - 1, default=offset)


def _kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    period, offset = _where(fields, "attn", 8, 4)
    return tuple(FULL if at % period == offset else STATE for at in range(num_layers)), 0


def _jamba(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    state = StateFacts(
        mixer="selective",
        conv_kernel=fields.integer("mamba_d_conv", 2, MAX_CONV_KERNEL, default=4),
        has_conv_bias=fields.flag("mamba_conv_bias", default=True),
        has_bias=fields.flag("mamba_proj_bias", default=False),
        heads=fields.integer("mamba_expand", 1, 64, default=2) * model_config.hidden_size,
        key_heads=1,
        key_dim=fields.integer("mamba_d_state", 1, MAX_WIDTH, default=16),
        value_dim=1,
        step_rank=_rank(fields, model_config, "mamba_dt_rank"),
        has_part_norms=True,
    )
    model_config = replace(model_config, state=state, rope=RopeFacts(kind="none"), rotary_dim=0)
    count = fields.integer("num_experts", 1, MAX_EXPERTS, default=16)
    if count == 1:
        return model_config
    period, offset = _where(fields, "expert", 2, 1)
    experts = ExpertFacts(
        count,
        fields.integer("num_experts_per_tok", 1, count, default=2),
        model_config.intermediate_size,
        dense_layers=tuple(at for at in range(model_config.num_layers) if at % period != offset),
        is_normalised=False,
    )
    return replace(model_config, experts=experts)


def _mamba(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    inner = fields.integer("expand", 1, 64, default=2) * model_config.hidden_size
    state = StateFacts(
        mixer="selective",
        conv_kernel=fields.integer("conv_kernel", 2, MAX_CONV_KERNEL, default=4),
        has_conv_bias=fields.flag("use_conv_bias", default=True),
        has_bias=fields.flag("use_bias", default=False),
        heads=fields.integer("intermediate_size", 1, MAX_WIDTH, default=inner),
        key_heads=1,
        key_dim=fields.integer("state_size", 1, MAX_WIDTH, default=16),
        value_dim=1,
        step_rank=_rank(fields, model_config, "time_step_rank"),
    )
    return replace(model_config, state=state, rope=RopeFacts(kind="none"))


def _of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    state = StateFacts(
        mixer="selective",
        conv_kernel=fields.integer("ssm.conv_kernel", 2, MAX_CONV_KERNEL),
        heads=fields.integer("ssm.inner_size", 1, MAX_WIDTH),
        key_heads=1,
        key_dim=fields.integer("ssm.state_size", 1, MAX_WIDTH),
        value_dim=1,
        step_rank=fields.integer("ssm.time_step_rank", 1, MAX_WIDTH),
    )
    if fields.flag("ssm.dt_b_c_rms", default=False):
        raise fields.error("ssm.dt_b_c_rms", True, "false: norms without weights are not supported")
    model_config = replace(model_config, state=state, rope=RopeFacts(kind="none"), rotary_dim=0)
    if fields.integer("expert_count", 0, MAX_EXPERTS, default=0) < 2:
        return model_config
    return replace(model_config, experts=gguf_experts(fields, model_config, is_normalised=False))


def _of_tensors(names: Container[str], model_config: ModelConfig) -> ModelConfig:
    """Find the layers with experts, and the biases and norms of layers with states."""
    at, state = biases_of_tensors(names, model_config)
    has_norms = f"blk.{at}.ssm_dt_norm.weight" in names
    model_config = replace(model_config, state=replace(state, has_part_norms=has_norms))
    if model_config.experts is None:
        return model_config
    layers = range(model_config.num_layers)
    dense = tuple(at for at in layers if f"blk.{at}.ffn_gate_inp.weight" not in names)
    return replace(model_config, experts=replace(model_config.experts, dense_layers=dense))


_GGUF = {
    "ssm_in": "mix:x+z",
    "ssm_conv1d": "conv",
    "ssm_x": "made",
    "ssm_dt.weight": "steps.weight",
    "ssm_dt.bias": "rates.bias",
    "ssm_dt_norm": "step_norm",
    "ssm_b_norm": "key_norm",
    "ssm_c_norm": "query_norm",
    "ssm_a": "rates.rate",
    "ssm_d": "rates.skip",
    "ssm_out": "out",
}
_GGUF_NAMES = NameMap(
    GGUF_NAMES
    | GGUF_EXPERTS
    | {f"blk.{{}}.{name}": f"layers.{{}}.attention.{to}" for name, to in _GGUF.items()}
)

MAMBA = Family(
    hub=HubForm(
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        heads=1,
        head_dim=64,
        tied=True,
        context=1 << 17,
        inner_keys=(),
        kinds=lambda fields, num_layers: ((STATE,) * num_layers, 0),
        more=_mamba,
    ),
    gguf=GgufForm(
        "MambaForCausalLM",
        kinds=lambda fields, num_layers: ((STATE,) * num_layers, 0),
        more=_of_gguf,
        of_tensors=_of_tensors,
    ),
    names={
        "gguf": _GGUF_NAMES,
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

JAMBA = Family(
    hub=HubForm(context=1 << 18, kinds=_kinds, more=_jamba),
    gguf=GgufForm("JambaForCausalLM", kinds=kinds_by_heads, more=_of_gguf, of_tensors=_of_tensors),
    names={
        "gguf": _GGUF_NAMES,
        "safetensors": NameMap(
            HUB_NAMES
            | _mixer("model.layers.{}.mamba")
            | FEED_FORWARD
            | {
                "model.layers.{}.mamba.dt_layernorm": "layers.{}.attention.step_norm",
                "model.layers.{}.mamba.b_layernorm": "layers.{}.attention.key_norm",
                "model.layers.{}.mamba.c_layernorm": "layers.{}.attention.query_norm",
                "model.layers.{}.feed_forward.router": "layers.{}.mlp.router",
                "model.layers.{}.feed_forward.experts.{}.gate_proj": (
                    "layers.{}.mlp.experts.gate_up:gate{}"
                ),
                "model.layers.{}.feed_forward.experts.{}.up_proj": (
                    "layers.{}.mlp.experts.gate_up:up{}"
                ),
                "model.layers.{}.feed_forward.experts.{}.down_proj": (
                    "layers.{}.mlp.experts.down:{}"
                ),
            }
        ),
    },
)
