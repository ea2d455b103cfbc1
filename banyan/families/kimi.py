"""Kimi-Linear (arXiv 2510.26692): delta attention with a decay per key dimension, latent attention
without RoPE in every fourth layer, experts routed as in DeepSeek-V3.

Source: the published configuration of moonshotai/Kimi-Linear-48B-A3B.
"""

from dataclasses import replace

from banyan.families.base import (
    MAX_LENGTH,
    MAX_WIDTH,
    Family,
    GgufForm,
    HubForm,
    Kinds,
    kinds_by_heads,
    state_where,
)
from banyan.families.experts import MAX_EXPERTS, gguf_corrected, gguf_latent_of, latent_of
from banyan.families.lfm import MAX_CONV_KERNEL
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

_MAX_HEADS = 4096
_LATENT_EPS = 1e-6
"""Eps of the norm of latents; no file states it."""


def _kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    """Older files list the attention layers, numbered from 1."""
    own = fields.part("linear_attn_config")
    full = own.listed("full_attn_layers") if own is not None else []
    names = {"full_attention": FULL, "linear_attention": STATE}

    def default(at: int) -> str:
        is_full = at + 1 in full if own is not None else at > 0 and at % 4 == 0
        return FULL if is_full else STATE

    return state_where(fields, num_layers, names, default), 0


def _state(fields: CheckpointFields) -> StateFacts:
    own = fields.part("linear_attn_config")

    def size(name: str, key: str, low: int, high: int, default: int) -> int:
        if own is not None:
            return own.integer(name, low, high, default=default)
        return fields.integer(key, low, high, default=default)

    heads = size("num_heads", "linear_num_heads", 1, _MAX_HEADS, 32)
    head_dim = size("head_dim", "linear_head_dim", 1, MAX_WIDTH, 128)
    return StateFacts(
        mixer="delta by key",
        conv_kernel=size("short_conv_kernel_size", "linear_conv_kernel_dim", 2, MAX_CONV_KERNEL, 4),
        heads=heads,
        key_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
    )


def _experts(fields: CheckpointFields, model_config: ModelConfig) -> ExpertFacts:
    scoring = fields.text("moe_router_activation_func", default="sigmoid")
    if scoring != "sigmoid":
        raise fields.error("moe_router_activation_func", scoring, "sigmoid")
    count = fields.integer("num_experts", 1, MAX_EXPERTS)
    groups = fields.integer("num_expert_group", 1, count, default=1)
    if count % groups or (groups > 1 and count // groups < 2):
        raise fields.error("num_expert_group", groups, f"groups of two or more of {count} experts")
    inner = fields.integer("moe_intermediate_size", 1, MAX_WIDTH)
    listed = fields.listed("mlp_layer_types")
    if listed and (len(listed) != model_config.num_layers or not {*listed} <= {"dense", "sparse"}):
        raise fields.error("mlp_layer_types", listed, f"{model_config.num_layers} of dense, sparse")
    first = fields.integer("first_k_dense_replace", 0, model_config.num_layers, default=1)
    period = fields.integer("moe_layer_freq", 1, 1 << 16, default=1)
    layers = range(model_config.num_layers)
    return ExpertFacts(
        count,
        fields.integer("num_experts_per_token", 1, count),
        inner,
        dense_layers=tuple(
            at
            for at in layers
            if (listed[at] == "dense" if listed else at < first or at % period > 0)
        ),
        shared_inner=inner * fields.integer("num_shared_experts", 0, MAX_EXPERTS, default=1),
        scoring="sigmoid",
        is_normalised=fields.flag("moe_renormalize", default=True),
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6, default=2.446),
        groups=groups,
        top_groups=fields.integer("topk_group", 1, groups, default=1),
        group_best=2,
        has_correction=True,
    )


def _of_hub(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """The norms of the latents have a different eps."""
    if not fields.flag("mla_use_nope", default=True):
        raise fields.error("mla_use_nope", False, "true: nothing rotates")
    model_config = latent_of(fields, replace(model_config, rope=RopeFacts(kind="none")))
    longest = fields.integer("model_max_length", 1, MAX_LENGTH, default=model_config.context_length)
    assert model_config.latent is not None
    return replace(
        model_config,
        state=_state(fields),
        experts=_experts(fields, model_config),
        latent=replace(model_config.latent, norm_eps=_LATENT_EPS),
        context_length=longest,
    )


def _of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Both kinds of attention have the same number of heads."""
    model_config = gguf_latent_of(fields, replace(model_config, rope=RopeFacts(kind="none")))
    head_dim = fields.integer("kda.head_dim", 1, MAX_WIDTH)
    state = StateFacts(
        mixer="delta by key",
        conv_kernel=fields.integer("ssm.conv_kernel", 2, MAX_CONV_KERNEL),
        heads=model_config.num_heads,
        key_heads=model_config.num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
    )
    assert model_config.latent is not None
    return replace(
        model_config,
        state=state,
        experts=gguf_corrected(fields, model_config),
        latent=replace(model_config.latent, norm_eps=_LATENT_EPS),
    )


_LAYER = "model.layers.{}"
_BLOCK = f"{_LAYER}.block_sparse_moe"
_OWN = f"{_LAYER}.self_attn"
_PLACE = "layers.{}.attention"
_MLP = {
    "gate_proj": "gate_up:gate",
    "up_proj": "gate_up:up",
    "down_proj": "down",
}
_NAMES = (
    {
        name: place
        for name, place in HUB_NAMES.items()
        if "self_attn" not in name or name.endswith("o_proj")
    }
    | {f"{_BLOCK}.{name}": f"layers.{{}}.mlp.{place}" for name, place in _MLP.items()}
    | {
        f"{_BLOCK}.shared_experts.{name}": f"layers.{{}}.mlp.shared.{place}"
        for name, place in _MLP.items()
    }
    | {
        f"{_BLOCK}.gate": "layers.{}.mlp.router",
        f"{_BLOCK}.gate.e_score_correction_bias": "layers.{}.mlp.router.correction",
        f"{_BLOCK}.experts.{{}}.w1": "layers.{}.mlp.experts.gate_up:gate{}",
        f"{_BLOCK}.experts.{{}}.w3": "layers.{}.mlp.experts.gate_up:up{}",
        f"{_BLOCK}.experts.{{}}.w2": "layers.{}.mlp.experts.down:{}",
        f"{_OWN}.k_proj": f"{_PLACE}.mix:k",
        f"{_OWN}.v_proj": f"{_PLACE}.mix:v",
        f"{_OWN}.b_proj": f"{_PLACE}.mix:b",
        **{f"{_OWN}.{part}_conv1d": f"{_PLACE}.conv:{part}" for part in "qkv"},
        f"{_OWN}.f_a_proj": f"{_PLACE}.squeeze:forget",
        f"{_OWN}.g_a_proj": f"{_PLACE}.squeeze:gate",
        f"{_OWN}.f_b_proj": f"{_PLACE}.forget",
        f"{_OWN}.g_b_proj": f"{_PLACE}.gate",
        f"{_OWN}.dt_bias": f"{_PLACE}.decays.bias",
        f"{_OWN}.A_log": f"{_PLACE}.decays.rate",
        f"{_OWN}.o_norm": f"{_PLACE}.norm",
        f"{_OWN}.q_proj": f"{_PLACE}.query",
        f"{_OWN}.q_a_proj": f"{_PLACE}.squeeze",
        f"{_OWN}.q_a_layernorm": f"{_PLACE}.query_norm",
        f"{_OWN}.q_b_proj": f"{_PLACE}.query",
        f"{_OWN}.kv_a_proj_with_mqa": f"{_PLACE}.latent",
        f"{_OWN}.kv_a_layernorm": f"{_PLACE}.latent_norm",
        f"{_OWN}.kv_b_proj": f"{_PLACE}.expansion",
    }
)

_GGUF = {
    "attn_q": "query",
    "attn_q_a": "squeeze",
    "attn_q_a_norm": "query_norm",
    "attn_q_b": "query",
    "attn_k": "mix:k",
    "attn_v": "mix:v",
    "attn_kv_a_mqa": "latent",
    "attn_kv_a_norm": "latent_norm",
    "attn_kv_b": "expansion",
    "ssm_beta": "mix:b",
    **{f"ssm_conv1d_{part}": f"conv:{part}" for part in "qkv"},
    "ssm_f_a": "squeeze:forget",
    "ssm_g_a": "squeeze:gate",
    "ssm_f_b": "forget",
    "ssm_g_b": "gate",
    "ssm_dt.bias": "decays.bias",
    "ssm_a": "decays.rate",
    "ssm_norm": "norm",
}

KIMI_LINEAR = Family(
    hub=HubForm(eps=1e-5, context=1 << 20, kinds=_kinds, more=_of_hub),
    gguf=GgufForm("KimiLinearForCausalLM", kinds=kinds_by_heads, more=_of_gguf),
    names={
        "safetensors": NameMap(_NAMES),
        "gguf": NameMap(
            GGUF_NAMES
            | GGUF_EXPERTS
            | {f"blk.{{}}.{name}": f"{_PLACE}.{to}" for name, to in _GGUF.items()}
        ),
    },
)
