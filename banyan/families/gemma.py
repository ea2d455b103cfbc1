"""Gemma 1 (arXiv 2403.08295): Llama with gated GELU and scaled embeddings.
Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786): norms before and after
each block. VaultGemma: Gemma 2 without the norms after the blocks.
 Hugging Face's form stores norm weights minus one, GGUF does not.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from banyan.families.base import (
    GELU_TANH,
    Family,
    GgufForm,
    HubForm,
    full_at_every,
    without_logits,
)
from banyan.families.names import (
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_NAMES,
    HUB_QK_NORM,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig, RopeFacts

_HUB = HUB_NAMES | {
    "model.layers.{}.post_attention_layernorm": "layers.{}.attention_post_norm",
    "model.layers.{}.pre_feedforward_layernorm": "layers.{}.mlp_norm",
    "model.layers.{}.post_feedforward_layernorm": "layers.{}.mlp_post_norm",
}
_GGUF = GGUF_NAMES | {
    "blk.{}.post_attention_norm": "layers.{}.attention_post_norm",
    "blk.{}.post_ffw_norm": "layers.{}.mlp_post_norm",
}


def _of_hub(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    if fields.flag("use_bidirectional_attention", default=False):
        raise fields.error("use_bidirectional_attention", True, "false, for text generation")
    size = fields.number("query_pre_attn_scalar", 1e-3, 1e9, default=256.0)
    return replace(
        model_config,
        attention_scale=size**-0.5,
        embedding_scale=model_config.hidden_size**0.5,
        attention_cap=_cap(fields, "attn_logit_softcapping"),
        logit_cap=_cap(fields, "final_logit_softcapping"),
    )


def _gemma2_of_hub(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """The caps have defaults; null turns them off."""
    return replace(
        _of_hub(fields, model_config),
        attention_cap=_cap(fields, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(fields, "final_logit_softcapping", 30.0),
    )


def _cap(fields: CheckpointFields, key: str, default: float = 0.0) -> float:
    if fields.states(key) and not fields.has(key):
        return 0.0
    return fields.number(key, 0.0, 1e9, default=default)


def _of_gguf(fields: CheckpointFields, model_config: ModelConfig, largest: int) -> ModelConfig:
    """The largest model of a generation scales by hidden size / heads; GGUF has no key for it."""
    is_largest = model_config.num_layers == largest
    size = (
        model_config.hidden_size / model_config.num_heads if is_largest else model_config.head_dim
    )
    return replace(
        model_config,
        attention_scale=fields.number("attention.scale", 1e-9, 1e6, default=size**-0.5),
        embedding_scale=model_config.hidden_size**0.5,
        attention_cap=fields.number("attn_logit_softcapping", 0.0, 1e9, default=0.0),
        logit_cap=fields.number("final_logit_softcapping", 0.0, 1e9, default=0.0),
    )


def _gemma3_of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    theta = fields.number("rope.freq_base_swa", 1.0, 1e12, default=10000.0)
    model_config = _of_gguf(fields, model_config, largest=62)
    return replace(
        model_config, window_rope=RopeFacts(theta=theta) if model_config.window else None
    )


_FORM = HubForm(
    activation_key="hidden_activation",
    activation=GELU_TANH,
    tied=True,
    head_dim=256,
    kinds=partial(full_at_every, period=2),
    more=_gemma2_of_hub,
)


def _gemma1_of_hub(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    if fields.flag("use_bidirectional_attention", default=False):
        raise fields.error("use_bidirectional_attention", True, "false, for text generation")
    return replace(model_config, embedding_scale=model_config.hidden_size**0.5)


def _activation(fields: CheckpointFields) -> Mapping[str, object]:
    """Older configurations name the exact GELU and mean the approximation."""
    return {"hidden_act": fields.any("hidden_activation") or GELU_TANH}


GEMMA = Family(
    hub=HubForm(
        activation=GELU_TANH,
        tied=True,
        head_dim=256,
        respelled=_activation,
        more=_gemma1_of_hub,
    ),
    gguf=GgufForm("GemmaForCausalLM", GELU_TANH, more=_gemma1_of_hub),
    names={"safetensors": NameMap(HUB_NAMES, norm_offset=1.0), "gguf": NameMap(GGUF_NAMES)},
)

GEMMA2 = Family(
    hub=_FORM,
    gguf=GgufForm(
        "Gemma2ForCausalLM", GELU_TANH, window_period=2, more=partial(_of_gguf, largest=46)
    ),
    names={"safetensors": NameMap(_HUB, norm_offset=1.0), "gguf": NameMap(_GGUF)},
    post_norm=True,
)

VAULT_GEMMA = replace(
    GEMMA2,
    gguf=None,
    names={
        "safetensors": NameMap(
            HUB_NAMES | {"model.layers.{}.pre_feedforward_layernorm": "layers.{}.mlp_norm"},
            norm_offset=1.0,
        )
    },
    post_norm=False,
)


def _gemma3_body(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """EmbeddingGemma (arXiv 2509.20354): every token sees both ways, half a window each."""
    looks_ahead = fields.flag("use_bidirectional_attention", default=False)
    plain = fields.with_values({"use_bidirectional_attention": False})
    return replace(
        without_logits(fields, _of_hub(plain, model_config)),
        is_encoder=looks_ahead,
        window=model_config.window // 2 + 1 if looks_ahead else model_config.window,
    )


GEMMA3 = Family(
    hub=replace(
        _FORM,
        rope_theta=1e6,
        window_theta=1e4,
        kinds=partial(full_at_every, period=6),
        more=_of_hub,
    ),
    gguf=GgufForm("Gemma3ForCausalLM", GELU_TANH, window_period=6, more=_gemma3_of_gguf),
    names={
        "safetensors": NameMap(_HUB | HUB_QK_NORM, norm_offset=1.0),
        "gguf": NameMap(_GGUF | GGUF_QK_NORM),
    },
    post_norm=True,
    qk_norm="head",
)

GEMMA3_BODY = replace(GEMMA3, hub=replace(GEMMA3.hub, more=_gemma3_body), gguf=None)
