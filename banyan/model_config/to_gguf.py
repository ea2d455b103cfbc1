"""Writes the metadata of a GGUF file from a ModelConfig: the inverse of `from_gguf.py`.

The written file is read back and compared (`differences`), so a field without a key here is an
error and never lost. Source: docs/gguf.md of ggml-org/ggml, gguf-py's constants.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.families import FAMILIES, GGUF, known_gguf
from banyan.families.base import GgufForm
from banyan.model_config.from_gguf import llama3_divisors
from banyan.model_config.model_config import FULL, WINDOW, ExpertFacts, ModelConfig, RopeFacts

_SOFTMAX, _SIGMOID = 1, 2
_OTHER_NAMES = {"MixtralForCausalLM": "llama", "MistralForCausalLM": "llama"}
"""Classes whose GGUF files use another class's architecture."""
_NOT_HELD = ("path", "format", "model_type", "dtype", "quant", "num_mtp_layers")
_EOS_KEYS = ("eos", "eot", "eom")
_WITH_PERIODS = ("ernie4_5-moe",)
"""Architectures whose files state the interval of layers with experts."""
_CLOSE = 1e-5
"""Relative tolerance: GGUF stores numbers as float32."""


def gguf_keys(model_config: ModelConfig) -> dict[str, object]:
    """The architecture's keys and the token ids.

    Raises:
        ModelError: no GGUF architecture is known for the model's class.
    """
    name, form = _architecture(model_config)
    own: dict[str, object] = {
        "block_count": model_config.num_layers,
        "context_length": model_config.context_length,
        "embedding_length": model_config.hidden_size,
        "feed_forward_length": model_config.intermediate_size,
        "attention.head_count": model_config.num_heads,
        "attention.head_count_kv": model_config.num_kv_heads,
        "attention.key_length": model_config.head_dim,
        "attention.value_length": model_config.head_dim,
        form.eps_key: float(model_config.norm_eps),
        "rope.dimension_count": model_config.rotary_dim or model_config.head_dim,
        "vocab_size": model_config.vocab_size,
        **_rope(model_config.rope),
        **_factors(model_config),
    }
    if model_config.window:
        own["attention.sliding_window"] = model_config.window
        if not form.window_period and FULL in model_config.layer_kinds:
            kinds = [
                model_config.kind_of(layer) == WINDOW for layer in range(model_config.num_layers)
            ]
            own["attention.sliding_window_pattern"] = kinds
    if model_config.experts is not None:
        own |= _experts(model_config.experts)
        if name in _WITH_PERIODS:
            own["interleave_moe_layer_step"] = 1
    ids = {f"{key}_token_id": id for key, id in zip(_EOS_KEYS, model_config.eos_ids, strict=False)}
    ids |= {f"{key}_token_id": id for key, id in _other_ids(model_config) if id is not None}
    return {
        "general.architecture": name,
        **{f"{name}.{key}": value for key, value in own.items()},
        **{f"tokenizer.ggml.{key}": id for key, id in ids.items()},
    }


def rope_divisors(model_config: ModelConfig) -> list[float]:
    """The values of "rope_freqs.weight" for Llama 3's RoPE scaling; [] for other kinds."""
    is_stretched = model_config.rope.kind == "llama3"
    return (
        llama3_divisors(model_config.rope, model_config.rotary_dim or model_config.head_dim)
        if is_stretched
        else []
    )


def differences(model_config: ModelConfig, written: ModelConfig) -> list[str]:
    """Fields whose value differs in the written file, one message each."""
    mistral = {"MistralForCausalLM", "LlamaForCausalLM"}  # the same architecture, but for a window
    found: list[str] = []
    for name, mine, its in _unlike("", model_config, written):
        if name in _NOT_HELD or (
            name == "eos_ids" and {*model_config.eos_ids} == {*written.eos_ids}
        ):
            continue
        if name == "architecture" and {model_config.architecture, written.architecture} == mistral:
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


def _architecture(model_config: ModelConfig) -> tuple[str, GgufForm]:
    wanted = _OTHER_NAMES.get(model_config.architecture, "")
    for name in known_gguf():
        form = FAMILIES.load(GGUF + name).gguf
        if form is not None and (name == wanted or form.architecture == model_config.architecture):
            return name, form
    raise ModelError(
        f"no GGUF architecture is known for {printable(model_config.architecture)}",
        hint="choose one of the types that folders have",
    )


def _other_ids(model_config: ModelConfig) -> tuple[tuple[str, int | None], ...]:
    return ("bos", model_config.bos_id), ("padding", model_config.pad_id)


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


def _factors(model_config: ModelConfig) -> dict[str, object]:
    """Scales and caps that differ from their defaults."""
    factors = {
        "embedding_scale": (model_config.embedding_scale, 1.0),
        "residual_scale": (model_config.residual_scale, 1.0),
        "attention.scale": (model_config.attention_scale, 0.0),
        "logit_scale": (_logit_scale(model_config), 1.0),
        "attn_logit_softcapping": (model_config.attention_cap, 0.0),
        "final_logit_softcapping": (model_config.logit_cap, 0.0),
    }
    return {key: float(value) for key, (value, plain) in factors.items() if value != plain}


def _logit_scale(model_config: ModelConfig) -> float:
    """Granite's files store the divisor of the logits."""
    return (
        1 / model_config.logit_scale
        if model_config.architecture.startswith("Granite")
        else model_config.logit_scale
    )


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
