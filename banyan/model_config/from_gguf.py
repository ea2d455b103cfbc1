"""ModelConfig of a GGUF file.

Source: the standardized keys of the GGUF specification (docs/gguf.md of ggml-org/ggml).
"""

import math
import struct
from collections import Counter
from collections.abc import Mapping

from banyan.base.errors import ModelError
from banyan.base.json_types import is_list
from banyan.base.log import printable
from banyan.families import FAMILIES, GGUF, known_gguf
from banyan.families.base import MAX_LENGTH, MAX_WIDTH, GgufForm
from banyan.formats.gguf import GGUFFile
from banyan.model_config.checkpoint_fields import CheckpointFields, shortest
from banyan.model_config.from_hf import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    refuse_unread,
    unknown_architecture,
)
from banyan.model_config.model_config import FULL, WINDOW, ModelConfig, RopeFacts

_ORIGINAL_LENGTH = "rope.scaling.original_context_length"
_UNSCALED = ("none", "default", "")
_LLAMA3_LENGTH = 8192
"""Original context length of every published Llama 3 model; GGUF does not store it."""


def read_gguf(path: str, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    """The ModelConfig of the GGUF file at `path`.

    Args:
        overrides: full metadata keys ("llama.context_length") whose values replace the file's.

    Raises:
        ModelError: names the key that is wrong.
        ConfigError: an override that nothing reads.
    """
    overrides, asked = overrides or {}, set[str]()
    with GGUFFile.open(path, has_words=False) as file:
        metadata = {**file.metadata, **overrides}
        general = CheckpointFields(metadata, path, asked=asked)
        name = general.text("general.architecture")
        if name not in known_gguf():
            raise unknown_architecture(name, path, known_gguf())
        family = FAMILIES.load(GGUF + name).gguf
        assert family is not None, f"{name} is listed for GGUF and has no such form"
        fields = CheckpointFields(metadata, path, f"{name}.", asked)
        fields = fields.with_values(family.respelled(fields))
        tokens = CheckpointFields(metadata, path, "tokenizer.ggml.", asked)
        model_config = family.more(fields, _model_config(file, fields, tokens, name, family))
        model_config = family.of_tensors(file.tensors, model_config)
        if (
            model_config.experts is None
            and fields.integer("expert_count", 0, 1 << 16, default=0) > 1
        ):
            raise unknown_architecture(f"{name} with experts", path, known_gguf())
        refuse_unread(overrides, asked)
        return model_config


def _model_config(
    file: GGUFFile, fields: CheckpointFields, tokens: CheckpointFields, name: str, family: GgufForm
) -> ModelConfig:
    """The fields that all families have."""
    num_heads, num_kv_heads, head_dim = _heads(fields, family)
    vocab_size = _vocab_size(file, fields)
    context_length = fields.integer("context_length", 1, MAX_LENGTH)
    num_layers = fields.integer("block_count", 1, MAX_LAYERS)
    if family.kinds is not None:
        kinds, window = family.kinds(fields, num_layers)
    else:
        kinds, window = _kinds(fields, num_layers, family.window_period)
    rotary_dim = _rotary_dim(fields, head_dim)
    has_norms = family.may_norm_heads and "blk.0.attn_q_norm.weight" in file.tensors
    return ModelConfig(
        path=file.path,
        format="gguf",
        architecture=family.architecture,
        model_type=name,
        vocab_size=vocab_size,
        hidden_size=fields.integer("embedding_length", 1, MAX_WIDTH),
        intermediate_size=_number(fields, family, "feed_forward_length", MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=context_length,
        norm_eps=shortest(fields.number(family.eps_key, 0.0, 1.0)),
        hidden_act=family.activation,
        rope=_rope(file, fields, rotary_dim, context_length, family.has_divisors),
        rotary_dim=rotary_dim if rotary_dim != head_dim else 0,
        tie_embeddings="output.weight" not in file.tensors,
        qk_norm="head" if has_norms else "",
        attention_bias=any(f"blk.0.attn_{n}.bias" in file.tensors for n in ("q", "qkv")),
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        layer_kinds=kinds,
        window=window,
        dtype=_main_type(file),
        bos_id=next(iter(tokens.token_ids("bos_token_id", vocab_size)), None),
        eos_ids=_eos_ids(tokens, vocab_size),
        pad_id=next(iter(tokens.token_ids("padding_token_id", vocab_size)), None),
    )


def _number(
    fields: CheckpointFields, family: GgufForm, key: str, most: int, default: int | None = None
) -> int:
    """One number for all layers. Models with states may list one per layer: 0 or the same value."""
    if family.kinds is None:
        return fields.integer(key, 1, most, default=default)
    listed = fields.any(key)
    if not is_list(listed):
        return fields.integer(key, 0, most, default=default)
    found = {value for value in listed if value}
    if len(found) > 1 or not all(isinstance(v, int) and 0 < v <= most for v in found):
        raise fields.error(key, listed, f"0 or one number of at most {most:,} for all layers")
    return next((value for value in found if isinstance(value, int)), 0)


def _heads(fields: CheckpointFields, family: GgufForm) -> tuple[int, int, int]:
    """Heads, kv heads and head size."""
    hidden_size = fields.integer("embedding_length", 1, MAX_WIDTH)
    num_heads = _number(fields, family, "attention.head_count", MAX_HEADS) or 1
    kv_key = "attention.head_count_kv"
    num_kv_heads = _number(fields, family, kv_key, MAX_HEADS, default=num_heads) or num_heads
    if num_heads % num_kv_heads:
        raise fields.error(
            "attention.head_count_kv", num_kv_heads, f"a divisor of {num_heads} heads"
        )
    if not fields.has("attention.key_length") and hidden_size % num_heads:
        raise fields.error("embedding_length", hidden_size, f"a multiple of {num_heads} heads")
    head_dim = fields.integer(
        "attention.key_length", 1, MAX_WIDTH, default=hidden_size // num_heads
    )
    if fields.has("attention.kv_lora_rank"):  # latent attention, which has widths of its own
        return num_heads, num_heads, head_dim
    value_dim = fields.integer("attention.value_length", 1, MAX_WIDTH, default=head_dim)
    if value_dim != head_dim:
        raise fields.error("attention.value_length", value_dim, f"the key length {head_dim}")
    return num_heads, num_kv_heads, head_dim


def _rotary_dim(fields: CheckpointFields, head_dim: int) -> int:
    rotary_dim = fields.integer("rope.dimension_count", 1, MAX_WIDTH, default=head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise fields.error("rope.dimension_count", rotary_dim, f"even and at most {head_dim}")
    return rotary_dim


def _kinds(fields: CheckpointFields, num_layers: int, period: int) -> tuple[tuple[str, ...], int]:
    """Kind of each layer and the window in tokens; ((), 0) = full attention in every layer."""
    key = "attention.sliding_window"
    window = fields.integer(key, 0, MAX_LENGTH, default=0)
    if not window:
        return (), 0
    pattern_key = "attention.sliding_window_pattern"
    pattern = fields.any(pattern_key)
    if is_list(pattern):
        if len(pattern) != num_layers or not all(isinstance(v, bool) for v in pattern):
            raise fields.error(pattern_key, pattern, f"{num_layers} times true or false")
        return tuple(WINDOW if is_window else FULL for is_window in pattern), window
    period = fields.integer(pattern_key, 0, MAX_LENGTH, default=period)
    is_full = [period > 0 and (layer + 1) % period == 0 for layer in range(num_layers)]
    return tuple(FULL if full else WINDOW for full in is_full), window


def _vocab_size(file: GGUFFile, fields: CheckpointFields) -> int:
    """The embedding has one row per token id; the metadata may leave the number out."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(
            f"{printable(file.path)!r} has no matrix token_embd.weight",
            hint="the file is damaged or holds no language model",
        )
    rows = embedding.shape[0]
    listed = file.num_strings.get("tokenizer.ggml.tokens", 0)
    if not 1 <= rows <= MAX_VOCAB or listed > rows:
        raise fields.error("vocab_size", rows, f"in [{max(1, listed):,}, {MAX_VOCAB:,}]")
    return rows


def _eos_ids(tokens: CheckpointFields, vocab_size: int) -> tuple[int, ...]:
    """End of text, of turn and of message: each ends the generation."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")
    found = [i for key in keys for i in tokens.token_ids(key, vocab_size)]
    return tuple(dict.fromkeys(found))


def _main_type(file: GGUFFile) -> str:
    """The most common type of the matrices."""
    types = Counter(t.type for t in file.tensors.values() if len(t.shape) > 1)
    return types.most_common(1)[0][0].lower() if types else "f32"


def _rope(
    file: GGUFFile,
    fields: CheckpointFields,
    rotary_dim: int,
    context_length: int,
    has_divisors: bool,
) -> RopeFacts:
    theta = fields.number("rope.freq_base", 1.0, 1e12, default=10000.0)
    if "rope_freqs.weight" in file.tensors and has_divisors:
        divisors = _numbers(file, "rope_freqs.weight", rotary_dim // 2)
        return RopeFacts(
            theta=theta,
            kind="longrope",
            original_length=context_length,
            attention_factor=1.0,
            short_factor=divisors,
            long_factor=divisors,
        )
    if "rope_freqs.weight" in file.tensors:
        return _llama3_rope(file, theta, rotary_dim)
    if "rope_factors_long.weight" in file.tensors:
        return _longrope(file, fields, theta, rotary_dim)
    kind = fields.text("rope.scaling.type", default="none")
    if kind in _UNSCALED:
        if fields.has("rope.scale_linear"):
            factor = fields.number("rope.scale_linear", 1.0, 1e4)
            return RopeFacts(theta=theta, kind="linear", factor=factor)
        return RopeFacts(theta=theta)
    if kind not in ("linear", "yarn"):
        raise fields.error("rope.scaling.type", kind, "none, linear or yarn")
    if fields.number("rope.scaling.attn_factor", 0.0, 1e4, default=1.0) != 1.0:
        raise fields.error("rope.scaling.attn_factor", "another value", "1")
    return RopeFacts(
        theta=theta,
        kind=kind,
        factor=fields.number("rope.scaling.factor", 1.0, 1e4),
        original_length=fields.integer(_ORIGINAL_LENGTH, 1, MAX_LENGTH, default=context_length),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 1e-3, 1e4, default=32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1e-3, 1e4, default=1.0),
    )


def _longrope(file: GGUFFile, fields: CheckpointFields, theta: float, rotary_dim: int) -> RopeFacts:
    """LongRoPE: the factors are tensors, the attention factor is a key."""
    return RopeFacts(
        theta=theta,
        kind="longrope",
        original_length=fields.integer(_ORIGINAL_LENGTH, 2, MAX_LENGTH),
        attention_factor=fields.number("rope.scaling.attn_factor", 0.0, 1e3, default=1.0),
        short_factor=_numbers(file, "rope_factors_short.weight", rotary_dim // 2),
        long_factor=_numbers(file, "rope_factors_long.weight", rotary_dim // 2),
    )


def _numbers(file: GGUFFile, name: str, count: int) -> tuple[float, ...]:
    """The values of a small F32 tensor of positive numbers."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type != "F32" or tensor.shape != (count,):
        found = f"is {tensor.type} {tensor.shape}" if tensor else "is missing"
        raise file.error(f"{name} {found}, not {count} numbers in F32")
    values = struct.unpack(f"<{count}f", file.bytes_of(name))
    if not all(1e-3 <= value <= 1e6 for value in values):
        raise file.error(f"{name} holds numbers outside [0.001, 1,000,000]")
    return values


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> RopeFacts:
    """Llama 3's RoPE scaling, which GGUF keeps only as a divisor per frequency.

    The parameters are recovered (the largest divisor is the factor, the rest are the published
    constants) and accepted only when they give back every divisor of the file.
    """
    divisors = _numbers(file, "rope_freqs.weight", head_dim // 2)
    factor = max(divisors)
    if factor < 1:
        raise file.error(f"rope_freqs.weight stretches by {factor:g}, not by 1 or more")
    rope = RopeFacts(theta=theta, kind="llama3", factor=factor, original_length=_LLAMA3_LENGTH)
    expected = llama3_divisors(rope, head_dim)
    if not all(math.isclose(d, e, rel_tol=1e-3) for d, e in zip(divisors, expected, strict=True)):
        raise file.error(
            "rope_freqs.weight is not Llama 3's pattern", "use the safetensors form of this model"
        )
    return rope


def llama3_divisors(rope: RopeFacts, head_dim: int) -> list[float]:
    """The divisor of each of the head_dim / 2 rotary frequencies (Llama 3.1's published rule)."""
    divisors: list[float] = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * rope.theta ** (2 * i / head_dim)
        turns = rope.original_length / wavelength
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = min(1.0, max(0.0, blend))
        divisors.append(1 / ((1 - blend) / rope.factor + blend))
    return divisors
