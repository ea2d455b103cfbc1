"""Llama 4 (published configurations of meta-llama): experts, and layers with and without rotation.

Layers with rotation attend within chunks of positions; q and k have length one there. Every fourth
layer has no rotation, and scales queries by position from `floor_scale` on. Requests end before
either would matter. The input of an expert is scaled by its score, not its output.
"""

from dataclasses import replace

from banyan.families.base import MAX_LENGTH, MAX_WIDTH, Family, HubForm, Kinds, limited
from banyan.families.experts import MAX_EXPERTS
from banyan.families.names import HUB_NAMES, QK, NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import FULL, WINDOW, ExpertFacts, ModelConfig, RopeFacts

_CHUNK, _FLOOR = 8192, 8192.0
_PERIOD = 4
"""Without a list, every fourth layer has no rotation."""


def _kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    """Layers with rotation are window layers: a window as long as a chunk, which no request
    leaves."""
    listed = fields.listed("no_rope_layers")
    period = fields.integer("no_rope_layer_interval", 1, num_layers, default=_PERIOD)
    turns = listed or [int((layer + 1) % period > 0) for layer in range(num_layers)]
    if len(turns) != num_layers or any(each not in (0, 1) for each in turns):
        raise fields.error("no_rope_layers", listed, f"{num_layers} of 0 and 1")
    chunk = fields.integer("attention_chunk_size", 1, MAX_LENGTH, default=_CHUNK)
    return tuple(WINDOW if each else FULL for each in turns), chunk


def _more(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    length = model_config.window
    if fields.flag("attn_temperature_tuning", default=True):
        length = min(length, int(fields.number("floor_scale", 2.0, MAX_LENGTH, default=_FLOOR)) - 1)
    count = fields.integer("num_local_experts", 1, MAX_EXPERTS)
    if fields.integer("num_experts_per_tok", 1, count, default=1) != 1:
        raise fields.error("num_experts_per_tok", fields.any("num_experts_per_tok"), "1")
    inner = fields.integer("intermediate_size", 1, MAX_WIDTH)
    step = fields.integer("interleave_moe_layer_step", 1, model_config.num_layers, default=1)
    sparse = fields.listed("moe_layers") or range(step - 1, model_config.num_layers, step)
    experts = ExpertFacts(
        count,
        1,
        inner,
        dense_layers=tuple(n for n in range(model_config.num_layers) if n not in sparse),
        shared_inner=inner,
        scoring="sigmoid",
        scales_input=True,
    )
    is_normed = fields.flag("use_qk_norm", default=True)
    why = "attention in chunks, and queries that are scaled by position, are not supported"
    return limited(
        replace(
            model_config,
            experts=experts,
            qk_norm="unit" if is_normed else "",
            rope=RopeFacts(kind="none"),
            window_rope=model_config.rope,
        ),
        length,
        why,
    )


_LAYER, _MLP = "model.layers.{}.feed_forward.", "layers.{}.mlp."
_NAMES = {
    "gate_proj": "gate_up:gate",
    "up_proj": "gate_up:up",
    "down_proj": "down",
    "router": "router",
    "experts.gate_up_proj": "experts.gate_up:gate*+up*.weight",
    "experts.down_proj": "experts.down:*.weight",
    "experts.{}.gate_proj": "experts.gate_up:gate{}",
    "experts.{}.up_proj": "experts.gate_up:up{}",
    "experts.{}.down_proj": "experts.down:{}",
    "shared_expert.gate_proj": "shared.gate_up:gate",
    "shared_expert.up_proj": "shared.gate_up:up",
    "shared_expert.down_proj": "shared.down",
}

LLAMA4 = Family(
    hub=HubForm(
        eps=1e-5,
        head_dim=128,
        rope_theta=5e5,
        inner_keys=("intermediate_size_mlp", "intermediate_size"),
        kinds=_kinds,
        more=_more,
    ),
    names={
        "safetensors": NameMap(
            HUB_NAMES | {_LAYER + name: _MLP + place for name, place in _NAMES.items()},
            paired=QK,
            has_inputs_first=True,
        )
    },
)
