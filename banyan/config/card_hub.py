"""ModelCard of a folder in Hugging Face's form: config.json, generation_config.json.

Source: the configuration classes' documented keys; `rope_parameters` is the later spelling of
`rope_scaling` plus `rope_theta`.
"""

import json
import os
from collections.abc import Callable

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.config.card import FULL, WINDOW, ModelCard, RopeFacts
from banyan.config.facts import Facts

MAX_CONFIG_BYTES = 4 << 20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
MAX_LENGTH = 1 << 26

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_LAYER_KINDS = {"full_attention": FULL, "sliding_attention": WINDOW}


def read_hub_folder(path: str) -> ModelCard:
    """Card of the folder at `path`; ModelError names the key that is wrong."""
    raw = _read_json(os.path.join(path, "config.json"), is_needed=True)
    facts = Facts(raw, os.path.join(path, "config.json"))
    architecture = _architecture(facts, path)
    return ARCHITECTURES[architecture](facts, path, architecture)


def _architecture(facts: Facts, path: str) -> str:
    listed = [name for name in facts.listed("architectures") if isinstance(name, str)]
    known = [name for name in listed if name in ARCHITECTURES]
    if known:
        return known[0]
    if facts.has("auto_map"):
        raise ModelError(
            f"{printable(path)!r} brings its own code ({printable(str(listed[:1]))}), and code of "
            "a model repository is never run",
            hint=f"known here: {', '.join(ARCHITECTURES)}",
        )
    raise unknown_architecture(", ".join(listed) or "none named", path, list(ARCHITECTURES))


def unknown_architecture(name: str, path: str, known: list[str]) -> ModelError:
    return ModelError(
        f"{printable(path)!r} has the unknown architecture {printable(name, 80)}",
        hint=f"known: {', '.join(known)}",
    )


def _llama(facts: Facts, path: str, architecture: str) -> ModelCard:
    """The Llama family: Llama, Mistral."""
    hidden_size = facts.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = facts.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = facts.integer("num_key_value_heads", 1, MAX_HEADS, default=num_heads)
    vocab_size = facts.integer("vocab_size", 1, MAX_VOCAB)
    context_length = facts.integer("max_position_embeddings", 1, MAX_LENGTH, default=2048)
    num_layers = facts.integer("num_hidden_layers", 1, MAX_LAYERS)
    if num_heads % num_kv_heads:
        raise facts.error("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} heads")
    if not facts.has("head_dim") and hidden_size % num_heads:
        raise facts.error("hidden_size", hidden_size, f"a multiple of {num_heads} heads")
    head_dim = facts.integer("head_dim", 1, MAX_WIDTH, default=hidden_size // num_heads)
    if head_dim % 2:
        raise facts.error("head_dim", head_dim, "even, so that rotary embedding can pair it")
    attention_bias = facts.flag("attention_bias", default=False)
    kinds, window = _layer_kinds(facts, num_layers)
    return ModelCard(
        path=path,
        format="safetensors",
        architecture=architecture,
        model_type=facts.text("model_type", default="llama"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=facts.integer("intermediate_size", 1, MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=context_length,
        norm_eps=facts.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
        hidden_act=_activation(facts),
        rope=_rope(facts, context_length),
        tie_embeddings=facts.flag("tie_word_embeddings", default=False),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=facts.flag("mlp_bias", default=False),
        layer_kinds=kinds,
        window=window,
        dtype=_dtype(facts),
        bos_id=next(iter(facts.token_ids("bos_token_id", vocab_size)), None),
        eos_ids=_eos_ids(facts, path, vocab_size),
        pad_id=_pad_id(facts, vocab_size),
    )


ARCHITECTURES: dict[str, Callable[[Facts, str, str], ModelCard]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama,
}


def _activation(facts: Facts) -> str:
    name = facts.text("hidden_act", default="silu")
    if name != "silu":
        raise facts.error("hidden_act", name, "silu, the one this family is built with")
    return name


def _dtype(facts: Facts) -> str:
    name = facts.text("dtype" if facts.has("dtype") else "torch_dtype", default="float32")
    if name not in ("float32", "float16", "bfloat16"):
        raise facts.error("dtype", name, "float32, float16 or bfloat16")
    return name


def _layer_kinds(facts: Facts, num_layers: int) -> tuple[tuple[str, ...], int]:
    """Kind of each layer and the window in tokens; ((), 0) when every layer sees everything."""
    if not facts.has("sliding_window") or not facts.flag("use_sliding_window", default=True):
        return (), 0
    window = facts.integer("sliding_window", 1, MAX_LENGTH)
    listed = facts.listed("layer_types")
    if not listed:
        return (WINDOW,) * num_layers, window
    kinds = tuple(_LAYER_KINDS.get(str(name), "") for name in listed)
    if len(kinds) != num_layers or "" in kinds:
        raise facts.error("layer_types", listed, f"{num_layers} of {', '.join(_LAYER_KINDS)}")
    return (kinds, window) if WINDOW in kinds else ((), 0)


def _rope(facts: Facts, context_length: int) -> RopeFacts:
    own = facts.part("rope_parameters") or facts.part("rope_scaling")
    theta = facts.number("rope_theta", 1.0, 1e12, default=10000.0)
    if own is None:
        return RopeFacts(theta=theta)
    kind = own.text("rope_type" if own.has("rope_type") else "type", default="default")
    if kind not in ROPE_KINDS:
        raise own.error("rope_type", kind, f"one of: {', '.join(ROPE_KINDS)}")
    attention = own.number("attention_factor", 0.0, 1e3) if own.has("attention_factor") else None
    return RopeFacts(
        theta=own.number("rope_theta", 1.0, 1e12, default=theta),
        kind=kind,
        factor=own.number("factor", 1.0, 1e4, default=1.0 if kind == "default" else None),
        original_length=own.integer(
            "original_max_position_embeddings",
            1,
            MAX_LENGTH,
            default=None if kind == "llama3" else context_length,
        ),
        low_freq_factor=own.number("low_freq_factor", 1e-3, 1e3, default=1.0),
        high_freq_factor=own.number("high_freq_factor", 1e-3, 1e3, default=4.0),
        beta_fast=own.number("beta_fast", 1e-3, 1e4, default=32.0),
        beta_slow=own.number("beta_slow", 1e-3, 1e4, default=1.0),
        attention_factor=attention,
        mscale=own.number("mscale", 0.0, 1e3, default=0.0),
        mscale_all_dim=own.number("mscale_all_dim", 0.0, 1e3, default=0.0),
        truncate=own.flag("truncate", default=True),
    )


def _eos_ids(facts: Facts, path: str, vocab_size: int) -> tuple[int, ...]:
    """Every id that ends a text: config.json's and generation_config.json's."""
    file = os.path.join(path, "generation_config.json")
    generation = Facts(_read_json(file, is_needed=False), file)
    ids = facts.token_ids("eos_token_id", vocab_size)
    return tuple(dict.fromkeys(ids + generation.token_ids("eos_token_id", vocab_size)))


def _pad_id(facts: Facts, vocab_size: int) -> int | None:
    """Some checkpoints write -1 for "none"."""
    if not facts.has("pad_token_id") or facts.integer("pad_token_id", -1, MAX_VOCAB) == -1:
        return None
    return next(iter(facts.token_ids("pad_token_id", vocab_size)), None)


def _read_json(path: str, *, is_needed: bool) -> dict[str, object]:
    name = printable(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        if not is_needed:
            return {}
        raise ModelError(
            f"{name!r} is missing", hint="name a folder that holds config.json and *.safetensors"
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read {name!r}: {error.strerror}") from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise ModelError(f"{name!r} is larger than {MAX_CONFIG_BYTES:,} bytes")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        raise ModelError(f"{name!r} is not JSON", hint="download it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{name!r} must hold a JSON object", hint="download it again")
    return content
