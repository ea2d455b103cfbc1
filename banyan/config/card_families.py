"""How each family's config.json departs from Llama's: keys, defaults, and what only it has.

Source: the documented fields and defaults of the families' configuration classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from banyan.config import card_experts
from banyan.config.card import FULL, WINDOW, ModelCard, RopeFacts
from banyan.config.facts import Facts

MAX_WIDTH = 1 << 20
MAX_LENGTH = 1 << 26

_LAYER_KINDS = {"full_attention": FULL, "sliding_attention": WINDOW}
_GELU = "gelu_pytorch_tanh"

Kinds = tuple[tuple[str, ...], int]
"""Kind of each layer and the window in tokens; ((), 0) when every layer sees everything."""


@dataclass(frozen=True)
class Biases:
    """Which projections have a bias."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


def _llama_biases(facts: Facts) -> Biases:
    has_bias = facts.flag("attention_bias", default=False)
    return Biases(has_bias, has_bias, facts.flag("mlp_bias", default=False))


def _use_bias(facts: Facts) -> Biases:
    has_bias = facts.flag("use_bias", default=True)
    return Biases(has_bias, has_bias, has_bias)


def _qkv_bias(facts: Facts) -> Biases:
    return Biases(qkv=facts.flag("attention_bias", default=True))


def plain_kinds(facts: Facts, num_layers: int) -> Kinds:
    """A window that is named holds for every layer, unless `layer_types` says otherwise."""
    if not facts.has("sliding_window"):
        return (), 0
    return _kinds(facts, num_layers, lambda layer: True)


def _qwen_kinds(facts: Facts, num_layers: int) -> Kinds:
    """The window must be asked for, and begins above the first `max_window_layers`."""
    if not facts.flag("use_sliding_window", default=False):
        return (), 0
    first = facts.integer("max_window_layers", 0, MAX_LENGTH, default=28)
    return _kinds(facts, num_layers, lambda layer: layer >= first)


def _every(facts: Facts, num_layers: int, period: int) -> Kinds:
    """Every `period`-th layer sees everything."""
    period = facts.integer("sliding_window_pattern", 1, MAX_LENGTH, default=period)
    return _kinds(facts, num_layers, lambda layer: (layer + 1) % period > 0)


def _kinds(facts: Facts, num_layers: int, has_window: Callable[[int], bool]) -> Kinds:
    window = facts.integer("sliding_window", 1, MAX_LENGTH, default=4096)
    listed = facts.listed("layer_types")
    if not listed:
        kinds = tuple(WINDOW if has_window(layer) else FULL for layer in range(num_layers))
    else:
        kinds = tuple(_LAYER_KINDS.get(str(name), "") for name in listed)
        if len(kinds) != num_layers or "" in kinds:
            raise facts.error("layer_types", listed, f"{num_layers} of {', '.join(_LAYER_KINDS)}")
    return (kinds, window) if WINDOW in kinds else ((), 0)


def no_more(facts: Facts, card: ModelCard) -> ModelCard:
    return card


def _gemma(facts: Facts, card: ModelCard) -> ModelCard:
    if facts.flag("use_bidirectional_attention", default=False):
        raise facts.error("use_bidirectional_attention", True, "false, for text generation")
    size = facts.number("query_pre_attn_scalar", 1e-3, 1e9, default=256.0)
    return replace(
        card,
        attention_scale=size**-0.5,
        embedding_scale=card.hidden_size**0.5,
        attention_cap=_cap(facts, "attn_logit_softcapping"),
        logit_cap=_cap(facts, "final_logit_softcapping"),
    )


def _gemma2(facts: Facts, card: ModelCard) -> ModelCard:
    """The caps have defaults, which null turns off."""
    return replace(
        _gemma(facts, card),
        attention_cap=_cap(facts, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(facts, "final_logit_softcapping", 30.0),
    )


def _cap(facts: Facts, key: str, default: float = 0.0) -> float:
    if facts.states(key) and not facts.has(key):
        return 0.0
    return facts.number(key, 0.0, 1e9, default=default)


def _granite(facts: Facts, card: ModelCard) -> ModelCard:
    return replace(
        card,
        embedding_scale=facts.number("embedding_multiplier", 1e-6, 1e6, default=1.0),
        residual_scale=facts.number("residual_multiplier", 1e-6, 1e6, default=1.0),
        attention_scale=facts.number("attention_multiplier", 1e-9, 1e6, default=1.0),
        logit_scale=1 / facts.number("logits_scaling", 1e-6, 1e6, default=1.0),
    )


def _cohere(facts: Facts, card: ModelCard) -> ModelCard:
    """Only window layers know positions."""
    return replace(
        card,
        logit_scale=facts.number("logit_scale", 1e-6, 1e6, default=0.0625),
        rope=RopeFacts(kind="none"),
        window_rope=card.rope,
    )


def _without_logits(facts: Facts, card: ModelCard) -> ModelCard:
    """The head, if there is one, scores classes: it is no copy of the embedding."""
    return replace(card, tie_embeddings=False)


def _encoder(facts: Facts, card: ModelCard, has_offset: bool) -> ModelCard:
    """RoBERTa counts positions from behind the padding id."""
    if facts.text("position_embedding_type", default="absolute") != "absolute":
        raise facts.error(
            "position_embedding_type", facts.any("position_embedding_type"), "absolute"
        )
    first = (1 if card.pad_id is None else card.pad_id) + 1 if has_offset else 0
    if first >= card.context_length:
        raise facts.error("max_position_embeddings", card.context_length, f"above {first}")
    return replace(
        card,
        is_encoder=True,
        tie_embeddings=False,
        rope=RopeFacts(kind="none"),
        num_segments=facts.integer("type_vocab_size", 1, 16, default=2),
        first_position=first,
        context_length=card.context_length - first,
    )


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        eps_key, eps: key of the norms' eps and its default.
        activation_key, activation: key of the activation, and the one this family is built with.
        head_dim: default; 0 = hidden size / heads.
        rope_theta: default.
        rotary: default share of a head that rotates.
        window_theta: default base of window layers when they have a RoPE of their own; 0 = no.
        rope_kinds: other names of RoPE kinds.
        more: fills in what only this family has.
    """

    eps_key: str = "rms_norm_eps"
    eps: float = 1e-6
    activation_key: str = "hidden_act"
    activation: str = "silu"
    tied: bool = False
    head_dim: int = 0
    rope_theta: float = 10000.0
    rotary: float = 1.0
    window_theta: float = 0.0
    rope_kinds: Mapping[str, str] | None = None
    biases: Callable[[Facts], Biases] = _llama_biases
    kinds: Callable[[Facts, int], Kinds] = plain_kinds
    more: Callable[[Facts, ModelCard], ModelCard] = no_more


_GEMMA = Family(
    activation_key="hidden_activation",
    activation=_GELU,
    tied=True,
    head_dim=256,
    kinds=partial(_every, period=2),
    more=_gemma2,
)

_BERT = Family(
    eps_key="layer_norm_eps",
    eps=1e-12,
    activation="gelu",
    biases=lambda facts: Biases(True, True, True),
    kinds=lambda facts, num_layers: ((), 0),
    more=partial(_encoder, has_offset=False),
)
_ROBERTA = replace(_BERT, more=partial(_encoder, has_offset=True))

_QWEN2 = Family(biases=lambda facts: Biases(qkv=True), kinds=_qwen_kinds)
_QWEN3 = Family(head_dim=128, kinds=_qwen_kinds)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "LlamaModel": Family(more=_without_logits),
    "MistralModel": Family(more=_without_logits),
    "Qwen2Model": replace(_QWEN2, more=_without_logits),
    "Qwen3Model": replace(_QWEN3, more=_without_logits),
    "LlamaForSequenceClassification": Family(more=_without_logits),
    "MistralForSequenceClassification": Family(more=_without_logits),
    "Qwen2ForSequenceClassification": replace(_QWEN2, more=_without_logits),
    "Qwen3ForSequenceClassification": replace(_QWEN3, more=_without_logits),
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": replace(
        _GEMMA, rope_theta=1e6, window_theta=1e4, kinds=partial(_every, period=6), more=_gemma
    ),
    "Phi3ForCausalLM": Family(
        eps=1e-5,
        biases=lambda facts: Biases(),
        rope_kinds={"su": "longrope", "yarn": "longrope"},
    ),
    "Olmo2ForCausalLM": Family(eps=1e-5),
    "GraniteForCausalLM": Family(more=_granite),
    "Glm4ForCausalLM": Family(eps=1.5625e-7, head_dim=128, rotary=0.5, biases=_qkv_bias),
    "Starcoder2ForCausalLM": Family(
        eps_key="norm_epsilon", eps=1e-5, activation=_GELU, tied=True, biases=_use_bias
    ),
    "Cohere2ForCausalLM": Family(
        eps_key="layer_norm_eps",
        eps=1e-5,
        tied=True,
        kinds=partial(_every, period=4),
        more=_cohere,
    ),
    "MixtralForCausalLM": Family(eps=1e-5, rope_theta=1e6, more=card_experts.mixtral),
    "OlmoeForCausalLM": Family(eps=1e-5, more=card_experts.olmoe),
    "Qwen2MoeForCausalLM": Family(
        biases=lambda facts: Biases(qkv=facts.flag("qkv_bias", default=True)),
        kinds=_qwen_kinds,
        more=partial(card_experts.qwen_moe, has_shared=True),
    ),
    "Qwen3MoeForCausalLM": replace(_QWEN3, more=card_experts.qwen_moe),
    "DeepseekV2ForCausalLM": Family(head_dim=64, more=card_experts.deepseek_v2),
    "DeepseekV3ForCausalLM": Family(head_dim=64, more=card_experts.deepseek_v3),
    "BertModel": _BERT,
    "BertForSequenceClassification": _BERT,
    "RobertaModel": _ROBERTA,
    "RobertaForSequenceClassification": _ROBERTA,
    "XLMRobertaModel": _ROBERTA,
    "XLMRobertaForSequenceClassification": _ROBERTA,
}
"""Hugging Face class name -> its family."""
