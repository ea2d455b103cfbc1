"""SoundConfig of a checkpoint in Hugging Face's form: config.json (`audio_config`), or for Whisper
its top level."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from banyan.model_config.checkpoint_fields import CheckpointFields, read_json
from banyan.model_config.media import SoundConfig, SoundTowerConfig

_MAX_WIDTH = 1 << 20
_MAX_BLOCKS = 1024
_MAX_ID = 1 << 31
_MAX_WINDOWS = 120
"""Longest sound of a prompt: one hour."""
_WHISPER = "WhisperForConditionalGeneration"
_MULTILINGUAL = 51865
"""Smallest vocabulary of Whisper's multilingual models."""
_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh")


def read_sound(
    outer: str, whole: CheckpointFields, hidden_size: int, path: str
) -> SoundConfig | None:
    """How the prompts of a checkpoint hold sound; None if its class takes none here.

    Args:
        outer: class in config.json.
        whole: the fields of config.json.
        hidden_size: of the text model.
        path: the folder.

    Raises:
        ModelError: names the key that is wrong.
    """
    if outer == _WHISPER:
        return _whisper(whole, hidden_size, path)
    reader = _READERS.get(outer)
    return None if reader is None else reader(whole, hidden_size)


def _tower(
    fields: CheckpointFields,
    out: int,
    bands: int = 128,
    stack: int = 1,
    pool: int = 1,
    merger: str = "linear",
    has_merger_bias: bool = True,
) -> SoundTowerConfig:
    """The sizes, under either of their names."""

    def size(old: str, new: str, low: int, high: int, default: int) -> int:
        return fields.integer(new if fields.has(new) else old, low, high, default=default)

    width = size("d_model", "hidden_size", 1, _MAX_WIDTH, 1280)
    heads = size("encoder_attention_heads", "num_attention_heads", 1, _MAX_WIDTH, 20)
    if width % heads:
        raise fields.error("d_model", width, f"a multiple of {heads} heads")
    activation = fields.text("activation_function", default="gelu")
    if activation not in _ACTIVATIONS:
        raise fields.error("activation_function", activation, f"one of {', '.join(_ACTIVATIONS)}")
    positions = fields.integer("max_source_positions", 1, 1 << 16, default=1500)
    if positions % (pool * stack):
        raise fields.error("max_source_positions", positions, f"a multiple of {pool * stack}")
    return SoundTowerConfig(
        blocks=size("encoder_layers", "num_hidden_layers", 1, _MAX_BLOCKS, 32),
        width=width,
        heads=heads,
        inner=size("encoder_ffn_dim", "intermediate_size", 1, _MAX_WIDTH, 5120),
        out=out,
        bands=fields.integer("num_mel_bins", 1, 1024, default=bands),
        window=2 * positions,
        activation=activation,
        pool=pool,
        stack=stack,
        merger=merger,
        has_merger_bias=has_merger_bias,
    )


def _audio(whole: CheckpointFields) -> CheckpointFields:
    found = whole.part("audio_config")
    return CheckpointFields({}, whole.where) if found is None else found


def _token(whole: CheckpointFields, default: int) -> int:
    key = "audio_token_id" if whole.has("audio_token_id") else "audio_token_index"
    return whole.integer(key, 0, _MAX_ID, default=default)


def _qwen2_audio(whole: CheckpointFields, hidden_size: int) -> SoundConfig:
    """Qwen2-Audio (arXiv 2407.10759): means of two states; the silence after a sound is not
    encoded."""
    tower = _tower(_audio(whole), hidden_size, pool=2)
    return SoundConfig(_token(whole, 151646), tower, is_whole=False)


def _voxtral(whole: CheckpointFields, hidden_size: int) -> SoundConfig:
    """Voxtral (arXiv 2507.13264): windows of 30 seconds, and several states make a feature row."""
    fields = _audio(whole)
    tower = _tower(fields, hidden_size)
    if tower.inner % tower.width or (tower.window // 2) % (tower.inner // tower.width):
        rule = f"a multiple of the width, {tower.width}, that divides the states of a window"
        raise fields.error("intermediate_size", tower.inner, rule)
    tower = _tower(
        fields,
        hidden_size,
        stack=tower.inner // tower.width,
        merger="mlp",
        has_merger_bias=False,
    )
    return SoundConfig(_token(whole, 24), tower, max_windows=_MAX_WINDOWS)


def _whisper(whole: CheckpointFields, hidden_size: int, path: str) -> SoundConfig:
    """Whisper (arXiv 2212.04356)."""
    layers = whole.integer("decoder_layers", 1, _MAX_BLOCKS)
    fields = whole.with_values(
        {"hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None}
    )
    tower = _tower(fields, 2 * layers * hidden_size, bands=80, merger="cross")
    file = os.path.join(path, "generation_config.json")
    generation = CheckpointFields(read_json(file, is_needed=False), file)
    vocab_size = whole.integer("vocab_size", 1, _MAX_ID)

    def ids(key: str) -> tuple[int, ...]:
        found = generation if generation.has(key) else whole
        listed = found.listed(key)
        return tuple(id for id in listed if type(id) is int and 0 <= id < vocab_size)

    return SoundConfig(
        token=whole.integer("decoder_start_token_id", 0, vocab_size - 1, default=50257),
        tower=replace(tower, layers=layers),
        max_windows=_MAX_WINDOWS,
        is_cross=True,
        is_multilingual=generation.flag("is_multilingual", default=vocab_size >= _MULTILINGUAL),
        suppressed=ids("suppress_tokens"),
        suppressed_first=ids("begin_suppress_tokens"),
    )


_READERS: Mapping[str, Callable[[CheckpointFields, int], SoundConfig]] = {
    "Qwen2AudioForConditionalGeneration": _qwen2_audio,
    "VoxtralForConditionalGeneration": _voxtral,
}
"""Class in config.json -> reader."""
