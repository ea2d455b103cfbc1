"""Nemotron (arXiv 2402.16819): layer norms whose weights are stored minus one, squared ReLU without
a gate, RoPE on half of a head.

Nemotron-H (arXiv 2504.03624): each layer is either a Mamba-2 mixer, attention without RoPE, a
feed-forward block or experts. Feed-forward blocks use squared ReLU, without a gate.

Source: the published configurations of nvidia/Nemotron-H and NVIDIA-Nemotron-3-Nano. Only
`time_step_limit` bounds the time steps, in prefill and in decode.
"""

from collections.abc import Container
from dataclasses import replace

from banyan.families.base import MAX_WIDTH, Family, GgufForm, HubForm, Kinds
from banyan.families.experts import corrected, gguf_corrected, without_mtp_layers
from banyan.families.llama import GGUF_PLAIN, HUB_PLAIN
from banyan.families.mamba import (
    MAX_HEADS,
    MIXER_PARTS,
    gguf_mixer,
    of_tensors,
    scan_of,
    state_of_gguf,
)
from banyan.families.names import GGUF_EXPERTS, GGUF_NAMES, NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import FULL, NONE, STATE, ModelConfig, RopeFacts

_EXPERTS = "moe"
_NAMES = {
    "M": STATE,
    "mamba": STATE,
    "linear_attention": STATE,
    "*": FULL,
    "attention": FULL,
    "full_attention": FULL,
    "-": NONE,
    "mlp": NONE,
    "E": NONE,
    _EXPERTS: NONE,
}
"""Names of the kinds in layer patterns and lists."""


def _listed(fields: CheckpointFields) -> list[str]:
    """The layer list; older files have a text with one letter per layer."""
    if fields.has("layers_block_type"):
        return [str(name) for name in fields.listed("layers_block_type")]
    return list(fields.text("hybrid_override_pattern"))


def _kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    listed = _listed(fields)
    kinds = tuple(_NAMES.get(name, "") for name in listed)
    if len(kinds) != num_layers or "" in kinds:
        rule = f"{num_layers} of {', '.join(_NAMES)}"
        raise fields.error("layers_block_type", "".join(listed)[:80], rule)
    return kinds, 0


def _of_hub(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    if not fields.has("head_dim"):
        head_dim = fields.integer("attention_head_dim", 1, MAX_WIDTH, default=model_config.head_dim)
        model_config = replace(model_config, head_dim=head_dim)
    heads = fields.integer("mamba_num_heads", 1, MAX_HEADS, default=128)
    groups = fields.integer("n_groups", 1, MAX_HEADS, default=8)
    if heads % groups:
        raise fields.error("n_groups", groups, f"a divisor of {heads} heads")
    activation = fields.text("mamba_hidden_act", default="silu")
    if activation != "silu":
        raise fields.error("mamba_hidden_act", activation, "silu")
    value_dim = fields.integer("mamba_head_dim", 1, MAX_WIDTH, default=64)
    state = scan_of(fields, (heads, groups), "ssm_state_size", value_dim)
    model_config = replace(model_config, state=state, rope=RopeFacts(kind="none"), rotary_dim=0)
    experts = [layer for layer, name in enumerate(_listed(fields)) if name in ("E", _EXPERTS)]
    if not experts:
        return model_config
    if fields.integer("n_shared_experts", 0, MAX_WIDTH, default=1) != 1:
        raise fields.error("n_shared_experts", fields.any("n_shared_experts"), "1")
    latent = "moe_latent_size"
    found = replace(
        corrected(fields, model_config, is_normalised=True, scale=1.0),
        dense_layers=tuple(at for at in range(model_config.num_layers) if at not in experts),
        shared_inner=fields.integer("moe_shared_expert_intermediate_size", 1, MAX_WIDTH),
        latent=fields.integer(latent, 1, MAX_WIDTH) if fields.has(latent) else 0,
        is_gated=False,
    )
    if found.latent and model_config.mlp_bias:
        raise fields.error("mlp_bias", True, "false with moe_latent_size")
    return replace(model_config, experts=found)


def _gguf_kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    """Layers with KV heads have attention, layers with an inner width are feed-forward blocks."""
    lists = [fields.listed(key) for key in ("attention.head_count_kv", "feed_forward_length")]
    for key, listed in zip(("attention.head_count_kv", "feed_forward_length"), lists, strict=True):
        if len(listed) != num_layers:
            raise fields.error(key, listed, f"a number for each of {num_layers}")
    last = num_layers - fields.integer("nextn_predict_layers", 0, num_layers - 1, default=0)
    return tuple(
        FULL if heads else NONE if inner else STATE for heads, inner in zip(*lists, strict=True)
    )[:last], 0


def _of_tensors(names: Container[str], model_config: ModelConfig) -> ModelConfig:
    """Find the biases of each kind of layer."""
    found = {
        kind: model_config.layer_kinds.index(kind)
        for kind in dict.fromkeys(model_config.layer_kinds)
    }

    def has(kind: str, *names_of: str) -> bool:
        at = found.get(kind)
        return any(at is not None and f"blk.{at}.{name}.bias" in names for name in names_of)

    return replace(
        of_tensors(names, model_config),
        attention_bias=has(FULL, "attn_q"),
        output_bias=has(FULL, "attn_output"),
        mlp_bias=has(NONE, "ffn_up", "ffn_up_shexp"),
    )


def _of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return state_of_gguf(fields, without_mtp_layers(fields, model_config))


def _moe_of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    model_config = _of_gguf(fields, model_config)
    latent = fields.integer("moe_latent_size", 0, MAX_WIDTH, default=0)
    layers = range(model_config.num_layers)
    experts = replace(
        gguf_corrected(fields, model_config),
        dense_layers=tuple(at for at in layers if model_config.kind_of(at) != NONE),
        latent=latent,
        is_gated=False,
    )
    return replace(model_config, experts=experts)


_GGUF = NameMap(
    {
        name: place
        for name, place in (GGUF_NAMES | GGUF_EXPERTS).items()
        if "ffn_gate." not in name and "ffn_up" not in name
    }
    | gguf_mixer("attention")
    | {
        "blk.{}.ffn_up": "layers.{}.mlp.up",
        "blk.{}.ffn_up_exps": "layers.{}.mlp.experts.gate_up:up*",
        "blk.{}.ffn_up_shexp": "layers.{}.mlp.shared.up",
        "blk.{}.ffn_latent_down": "layers.{}.mlp.into",
        "blk.{}.ffn_latent_up": "layers.{}.mlp.back",
    },
    has_more_layers=True,
)
_GGUF_FORM = GgufForm(
    "NemotronHForCausalLM",
    activation="relu2",
    kinds=_gguf_kinds,
    more=_of_gguf,
    of_tensors=_of_tensors,
)
_LAYER = "backbone.layers.{}.mixer"

NEMOTRON = Family(
    hub=HubForm(eps_key="norm_eps", eps=1e-5, activation="relu2", rotary=0.5),
    gguf=GgufForm("NemotronForCausalLM", "relu2", "attention.layer_norm_epsilon"),
    names={"safetensors": NameMap(HUB_PLAIN, norm_offset=1.0), "gguf": NameMap(GGUF_PLAIN)},
    norm="layer+bias",
    gated=False,
)

NEMOTRON_H = Family(
    hub=HubForm(
        eps_key="layer_norm_epsilon",
        eps=1e-5,
        head_dim=128,
        context=4096,
        activation_key="mlp_hidden_act",
        activation="relu2",
        kinds=_kinds,
        num_layers=lambda fields: len(_listed(fields)),
        more=_of_hub,
    ),
    gguf=_GGUF_FORM,
    names={
        "gguf": _GGUF,
        "safetensors": NameMap(
            {f"{_LAYER}.{name}": f"layers.{{}}.attention.{to}" for name, to in MIXER_PARTS.items()}
            | {
                "backbone.embeddings": "embedding",
                "backbone.layers.{}.norm": "layers.{}.attention_norm",
                "backbone.norm_f": "norm",
                "lm_head": "head",
                f"{_LAYER}.q_proj": "layers.{}.attention.qkv:q",
                f"{_LAYER}.k_proj": "layers.{}.attention.qkv:k",
                f"{_LAYER}.v_proj": "layers.{}.attention.qkv:v",
                f"{_LAYER}.o_proj": "layers.{}.attention.out",
                f"{_LAYER}.up_proj": "layers.{}.mlp.up",
                f"{_LAYER}.down_proj": "layers.{}.mlp.down",
                f"{_LAYER}.gate": "layers.{}.mlp.router",
                f"{_LAYER}.gate.e_score_correction_bias": "layers.{}.mlp.router.correction",
                f"{_LAYER}.experts.{{}}.up_proj": "layers.{}.mlp.experts.gate_up:up{}",
                f"{_LAYER}.experts.{{}}.down_proj": "layers.{}.mlp.experts.down:{}",
                f"{_LAYER}.shared_experts.up_proj": "layers.{}.mlp.shared.up",
                f"{_LAYER}.shared_experts.down_proj": "layers.{}.mlp.shared.down",
                f"{_LAYER}.fc1_latent_proj": "layers.{}.mlp.into",
                f"{_LAYER}.fc2_latent_proj": "layers.{}.mlp.back",
            },
            unread=("mtp.",),
        ),
    },
    gated=False,
    has_single_parts=True,
)

NEMOTRON_H_MOE = replace(NEMOTRON_H, gguf=replace(_GGUF_FORM, more=_moe_of_gguf))
