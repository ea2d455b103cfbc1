"""The metadata of a GGUF file from a card: what `card_gguf.py` reads, written.

What is written is read back, and held against the card (`differences`), so a fact that has no key
here is a refusal and never lost. Source: docs/gguf.md of ggml-org/ggml, gguf-py's constants.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.families import FAMILIES, GGUF, known_gguf
from banyan.families.base import GgufForm
from banyan.model_config.from_gguf import llama3_divisors
from banyan.model_config.model_config import FULL, WINDOW, ExpertFacts, ModelCard, RopeFacts

_SOFTMAX, _SIGMOID = 1, 2
_OTHER_NAMES = {"MixtralForCausalLM": "llama", "MistralForCausalLM": "llama"}
"""Classes whose files are of another one's architecture."""
_NOT_HELD = ("path", "format", "model_type", "dtype", "quant", "num_ahead")
_EOS_KEYS = ("eos", "eot", "eom")
_WITH_PERIODS = ("ernie4_5-moe",)
"""Whose files say every how many layers there are experts."""
_CLOSE = 1e-5
"""Numbers are kept in fp32."""


def gguf_keys(card: ModelCard) -> dict[str, object]:
    """The keys of the architecture, and ids of the vocabulary.

    Raises:
        ModelError: no GGUF architecture is known for the model's class.
    """
    name, form = _architecture(card)
    own: dict[str, object] = {
        "block_count": card.num_layers,
        "context_length": card.context_length,
        "embedding_length": card.hidden_size,
        "feed_forward_length": card.intermediate_size,
        "attention.head_count": card.num_heads,
        "attention.head_count_kv": card.num_kv_heads,
        "attention.key_length": card.head_dim,
        "attention.value_length": card.head_dim,
        form.eps_key: float(card.norm_eps),
        "rope.dimension_count": card.rotary_dim or card.head_dim,
        "vocab_size": card.vocab_size,
        **_rope(card.rope),
        **_factors(card),
    }
    if card.window:
        own["attention.sliding_window"] = card.window
        if not form.window_period and FULL in card.layer_kinds:
            kinds = [card.kind_of(layer) == WINDOW for layer in range(card.num_layers)]
            own["attention.sliding_window_pattern"] = kinds
    if card.experts is not None:
        own |= _experts(card.experts)
        if name in _WITH_PERIODS:
            own["interleave_moe_layer_step"] = 1
    ids = {f"{key}_token_id": id for key, id in zip(_EOS_KEYS, card.eos_ids, strict=False)}
    ids |= {f"{key}_token_id": id for key, id in _other_ids(card) if id is not None}
    return {
        "general.architecture": name,
        **{f"{name}.{key}": value for key, value in own.items()},
        **{f"tokenizer.ggml.{key}": id for key, id in ids.items()},
    }


def rope_divisors(card: ModelCard) -> list[float]:
    """What a file keeps of Llama 3's stretching, under "rope_freqs.weight"; [] for other kinds."""
    is_stretched = card.rope.kind == "llama3"
    return llama3_divisors(card.rope, card.rotary_dim or card.head_dim) if is_stretched else []


def differences(card: ModelCard, written: ModelCard) -> list[str]:
    """The facts that a file does not say as the model does, each in words."""
    mistral = {"MistralForCausalLM", "LlamaForCausalLM"}  # one and the same, but for a window
    found: list[str] = []
    for name, mine, its in _unlike("", card, written):
        if name in _NOT_HELD or (name == "eos_ids" and {*card.eos_ids} == {*written.eos_ids}):
            continue
        if name == "architecture" and {card.architecture, written.architecture} == mistral:
            continue
        found.append(f"{name} is {printable(str(mine), 80)}, not {printable(str(its), 80)}")
    return found


def _unlike(name: str, mine: object, its: object) -> Iterator[tuple[str, object, object]]:
    if is_dataclass(mine) and type(mine) is type(its):
        for each in fields(mine):
            inner = f"{name}.{each.name}" if name else each.name
            yield from _unlike(inner, getattr(mine, each.name), getattr(its, each.name))
    elif isinstance(mine, float) and isinstance(its, float):
        if abs(mine - its) > _CLOSE * max(abs(mine), abs(its)):
            yield name, mine, its
    elif mine != its:
        yield name, mine, its


def _architecture(card: ModelCard) -> tuple[str, GgufForm]:
    wanted = _OTHER_NAMES.get(card.architecture, "")
    for name in known_gguf():
        form = FAMILIES.load(GGUF + name).gguf
        if form is not None and (name == wanted or form.architecture == card.architecture):
            return name, form
    raise ModelError(
        f"no GGUF architecture is known for {printable(card.architecture)}",
        hint="choose one of the types that folders have",
    )


def _other_ids(card: ModelCard) -> tuple[tuple[str, int | None], ...]:
    return ("bos", card.bos_id), ("padding", card.pad_id)


def _rope(rope: RopeFacts) -> dict[str, object]:
    keys: dict[str, object] = {"rope.freq_base": float(rope.theta)}
    if rope.kind not in ("linear", "yarn"):
        return keys
    keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
    if rope.original_length:
        keys["rope.scaling.original_context_length"] = rope.original_length
    if rope.kind == "yarn":
        keys["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        keys["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    return keys


def _factors(card: ModelCard) -> dict[str, object]:
    """Those that are not one, or not off."""
    told = {
        "embedding_scale": (card.embedding_scale, 1.0),
        "residual_scale": (card.residual_scale, 1.0),
        "attention.scale": (card.attention_scale, 0.0),
        "logit_scale": (_logit_scale(card), 1.0),
        "attn_logit_softcapping": (card.attention_cap, 0.0),
        "final_logit_softcapping": (card.logit_cap, 0.0),
    }
    return {key: float(value) for key, (value, plain) in told.items() if value != plain}


def _logit_scale(card: ModelCard) -> float:
    """Granite's files say what logits are divided by."""
    return 1 / card.logit_scale if card.architecture.startswith("Granite") else card.logit_scale


def _experts(experts: ExpertFacts) -> dict[str, object]:
    keys: dict[str, object] = {
        "expert_count": experts.count,
        "expert_used_count": experts.per_token,
        "expert_feed_forward_length": experts.inner,
        "expert_weights_norm": experts.is_normalised,
        "expert_gating_func": _SIGMOID if experts.scoring == "sigmoid" else _SOFTMAX,
    }
    if experts.scoring == "sigmoid" or experts.scale != 1.0:
        keys["expert_weights_scale"] = float(experts.scale)
    if experts.scoring == "sigmoid" or experts.shared_inner or experts.dense_layers:
        keys["leading_dense_block_count"] = len(experts.dense_layers)
    if experts.shared_inner:
        keys["expert_shared_feed_forward_length"] = experts.shared_inner
        if not experts.has_shared_gate:
            keys["expert_shared_count"] = max(1, experts.shared_inner // experts.inner)
            keys["expert_shared_feed_forward_length"] = experts.inner
    if experts.scoring == "sigmoid" or experts.groups > 1:
        keys["expert_group_count"] = experts.groups
        keys["expert_group_used_count"] = experts.top_groups
    return keys
