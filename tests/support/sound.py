"""Sounds, WAV files, and tiny random checkpoints of models that hear, made offline."""

import io
import struct
import wave
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.support.multimodal import TEXT, VOCAB, Recipe, write_tokenizer

PAD = "<|AUDIO|>"
RATE = 16_000
BANDS = 128
WINDOW = 120
"""Mel frames of a window of the tiny models: 1.2 seconds."""
WHISPER_TOKENS = (
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|notimestamps|>",
)


def samples(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """Tones that change, with noise; float32 within ±0.6."""
    draw = np.random.default_rng(seed)
    times = np.arange(int(seconds * rate)) / rate
    pitch = 200 + 150 * np.sin(2 * np.pi * times * (1 + seed % 3)) + 40 * seed
    tone = 0.4 * np.sin(2 * np.pi * np.cumsum(pitch) / rate)
    return (tone + draw.normal(0, 0.03, len(times))).astype(np.float32)


def wav(values: np.ndarray, rate: int = RATE) -> bytes:
    """A WAV file of 16 bits; values: [frames] or [frames, channels]."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1 if values.ndim == 1 else values.shape[1])
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((values * 32767).astype("<i2").tobytes())
    return file.getvalue()


def wav_of(kind: int, bits: int, data: bytes, channels: int = 1, rate: int = RATE) -> bytes:
    """A WAV file with this coding and these bytes."""
    width = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * width % 2**32, width % 2**16, bits)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form
    body += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def rounded_mel(values: np.ndarray, bands: int, frames: int) -> torch.Tensor:
    """What transformers' processor makes of samples, as it travels here; [1, bands, frames]."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=bands)
    found = extractor(
        values, sampling_rate=RATE, max_length=frames * 160, return_tensors="pt"
    ).input_features
    return found.half().float()


def tiny_listener(family: str, folder: Path, seed: int = 0) -> transformers.PreTrainedModel:
    """A random Qwen2-Audio or Voxtral, with a tokenizer whose template writes PAD for a sound."""
    folder.mkdir(parents=True, exist_ok=True)
    specials = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", PAD)
    write_tokenizer(folder, specials, Recipe("", {}, {}, {}, "", sound=PAD))
    token = 256 + specials.index(PAD)
    torch.manual_seed(seed)
    if family == "qwen2_audio":
        audio = {"d_model": 32, "encoder_layers": 3, "encoder_attention_heads": 2}
        audio |= {"encoder_ffn_dim": 48, "max_source_positions": WINDOW // 2}
        config = transformers.Qwen2AudioConfig(
            audio_config=audio,
            text_config=TEXT | {"model_type": "qwen2"},
            audio_token_index=token,
        )
        model = transformers.Qwen2AudioForConditionalGeneration(config)
    else:
        audio = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
        audio |= {"intermediate_size": 128, "max_source_positions": WINDOW // 2}
        config = transformers.VoxtralConfig(
            audio_config=audio,
            text_config=TEXT | {"model_type": "llama", "head_dim": 16},
            audio_token_id=token,
        )
        model = transformers.VoxtralForConditionalGeneration(config)
    return _filled(model, folder)


def tiny_whisper(folder: Path, seed: int = 0) -> transformers.PreTrainedModel:
    """A random Whisper with windows of 1.2 seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    specials = ("<|bos|>", "<|eos|>", *WHISPER_TOKENS)
    write_tokenizer(folder, specials, Recipe("", {}, {}, {}, ""))
    torch.manual_seed(seed)
    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=56,
        num_mel_bins=80,
        max_source_positions=WINDOW // 2,
        max_target_positions=96,
        pad_token_id=256,
        bos_token_id=256,
        eos_token_id=257,
        decoder_start_token_id=258,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.is_multilingual = True
    model.generation_config.suppress_tokens = [5, 9]
    model.generation_config.begin_suppress_tokens = [7]
    return _filled(model, folder)


def _filled(model: transformers.PreTrainedModel, folder: Path) -> transformers.PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw = torch.randn_like(parameter)
            if parameter.dim() > 1:
                # Larger where it keeps the tokens of Whisper from repeating.
                is_large = "decoder.embed_positions" in name or "encoder_attn.out_proj" in name
                parameter.copy_(draw * (0.8 if is_large else 0.2))
            else:
                parameter.copy_(draw * 0.3 + (0.0 if name.endswith(".bias") else 1.0))
    model.tie_weights()
    model.eval().save_pretrained(folder)
    return model
