"""LFM2 (arXiv 2511.23404): gated short convolutions, and full attention in a few layers; dense or
with experts."""

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
from banyan.families.experts import MAX_EXPERTS, gguf_corrected
from banyan.families.names import GGUF_EXPERTS, GGUF_NAMES, GGUF_QK_NORM, HUB_NAMES, NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import FULL, STATE, ExpertFacts, ModelConfig, StateFacts

MAX_CONV_KERNEL = 16


def _kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    full = fields.listed("full_attn_idxs") or list(range(num_layers))
    names = {"full_attention": FULL, "conv": STATE}
    kinds = state_where(fields, num_layers, names, lambda at: FULL if at in full else STATE)
    return kinds, 0


def _state_of(fields: CheckpointFields) -> StateFacts:
    has_bias = fields.flag("conv_bias", default=False)
    return StateFacts(
        mixer="conv",
        conv_kernel=fields.integer("conv_L_cache", 2, MAX_CONV_KERNEL, default=3),
        has_conv_bias=has_bias,
        has_bias=has_bias,
    )


def _of_experts(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """The first few layers are dense. Scores are sigmoids, with a bias for the choice only."""
    count = fields.integer("num_experts", 1, MAX_EXPERTS, default=32)
    experts = ExpertFacts(
        count,
        fields.integer("num_experts_per_tok", 1, count, default=min(4, count)),
        fields.integer("moe_intermediate_size", 1, MAX_WIDTH, default=1792),
        dense_layers=tuple(
            range(fields.integer("num_dense_layers", 0, model_config.num_layers, default=2))
        ),
        scoring="sigmoid",
        is_normalised=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6, default=1.0),
        has_correction=fields.flag("use_expert_bias", default=True),
    )
    tied = fields.flag("tie_embedding", default=model_config.tie_embeddings)
    return replace(model_config, state=_state_of(fields), experts=experts, tie_embeddings=tied)


def _of_hub(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    inner = model_config.intermediate_size
    if fields.flag("block_auto_adjust_ff_dim", default=True):
        inner = int(2 * inner / 3)
        inner = int(inner * fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, default=1.0))
        multiple = fields.integer("block_multiple_of", 1, MAX_WIDTH, default=256)
        inner = -(-inner // multiple) * multiple
    tied = fields.flag("tie_embedding", default=model_config.tie_embeddings)
    return replace(
        model_config, intermediate_size=inner, state=_state_of(fields), tie_embeddings=tied
    )


_NAMES = {name: place for name, place in HUB_NAMES.items() if ".mlp." not in place}

_LFM = _NAMES | {
    "model.embedding_norm": "norm",
    "model.layers.{}.operator_norm": "layers.{}.attention_norm",
    "model.layers.{}.ffn_norm": "layers.{}.mlp_norm",
    "model.layers.{}.self_attn.out_proj": "layers.{}.attention.out",
    "model.layers.{}.self_attn.q_layernorm": "layers.{}.attention.q_norm",
    "model.layers.{}.self_attn.k_layernorm": "layers.{}.attention.k_norm",
    "model.layers.{}.conv.in_proj": "layers.{}.attention.mix:b+c+x",
    "model.layers.{}.conv.conv": "layers.{}.attention.conv",
    "model.layers.{}.conv.out_proj": "layers.{}.attention.out",
    "model.layers.{}.feed_forward.w1": "layers.{}.mlp.gate_up:gate",
    "model.layers.{}.feed_forward.w3": "layers.{}.mlp.gate_up:up",
    "model.layers.{}.feed_forward.w2": "layers.{}.mlp.down",
}


def _of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    state = StateFacts(
        mixer="conv", conv_kernel=fields.integer("shortconv.l_cache", 2, MAX_CONV_KERNEL)
    )
    return replace(model_config, state=state)


def _experts_of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return replace(_of_gguf(fields, model_config), experts=gguf_corrected(fields, model_config))


def _of_tensors(names: Container[str], model_config: ModelConfig) -> ModelConfig:
    """Find the biases of convolutions and routers."""
    assert model_config.state is not None
    layers = range(model_config.num_layers)
    at = next((at for at in layers if STATE in model_config.kept_by(at)), 0)
    has_bias = f"blk.{at}.shortconv.in_proj.bias" in names
    model_config = replace(
        model_config, state=replace(model_config.state, has_bias=has_bias, has_conv_bias=has_bias)
    )
    if model_config.experts is None:
        return model_config
    corrected = any(f"blk.{at}.exp_probs_b.bias" in names for at in layers)
    return replace(model_config, experts=replace(model_config.experts, has_correction=corrected))


_GGUF_NAMES = (
    GGUF_NAMES
    | GGUF_QK_NORM
    | {
        "token_embd_norm": "norm",
        "blk.{}.shortconv.in_proj": "layers.{}.attention.mix:b+c+x",
        "blk.{}.shortconv.conv": "layers.{}.attention.conv",
        "blk.{}.shortconv.out_proj": "layers.{}.attention.out",
    }
)
_GGUF = GgufForm("Lfm2ForCausalLM", kinds=kinds_by_heads, more=_of_gguf, of_tensors=_of_tensors)

LFM2 = Family(
    hub=HubForm(
        eps_key="norm_eps",
        eps=1e-5,
        inner_keys=("block_ff_dim", "intermediate_size"),
        tied=True,
        rope_theta=1e6,
        kinds=_kinds,
        more=_of_hub,
    ),
    gguf=_GGUF,
    names={"gguf": NameMap(_GGUF_NAMES), "safetensors": NameMap(_LFM)},
    qk_norm="head",
)

LFM2_MOE = replace(
    LFM2,
    hub=replace(LFM2.hub, inner_keys=("intermediate_size",), more=_of_experts),
    gguf=replace(_GGUF, architecture="Lfm2MoeForCausalLM", more=_experts_of_gguf),
    names={
        "gguf": NameMap(_GGUF_NAMES | GGUF_EXPERTS),
        "safetensors": NameMap(
            _LFM
            | {
                "model.layers.{}.feed_forward.gate": "layers.{}.mlp.router",
                "model.layers.{}.feed_forward.expert_bias": "layers.{}.mlp.router.correction",
                "model.layers.{}.feed_forward.experts.{}.w1": (
                    "layers.{}.mlp.experts.gate_up:gate{}"
                ),
                "model.layers.{}.feed_forward.experts.{}.w3": "layers.{}.mlp.experts.gate_up:up{}",
                "model.layers.{}.feed_forward.experts.{}.w2": "layers.{}.mlp.experts.down:{}",
            }
        ),
    },
)
