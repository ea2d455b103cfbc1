"""Files of sound → samples → mel spectrograms. Only worker processes (worker.py) decode.

WAV files are read here, others by the package soundfile if it is installed. The spectrograms equal
what transformers' WhisperFeatureExtractor makes, up to rounding to float16.
"""

import hashlib
import io
import math
import struct
from functools import cache
from typing import Any

import numpy as np
from numpy import fft, lib  # now: a worker opens no files later

from banyan.media.processes import DecodedSound, SoundPart, SoundTask
from banyan.model_config.media import FRAMES_PER_SECOND, SAMPLE_RATE

try:
    import soundfile  # pyright: ignore[reportMissingImports]
except (ImportError, OSError):  # OSError: its C library is missing
    soundfile = None

HOP = SAMPLE_RATE // FRAMES_PER_SECOND
_WINDOW = 400
"""Samples of one Fourier transform."""
_MAX_RATE = 768_000
_MAX_CHANNELS = 64
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_ZEROS = 24
"""Zero crossings of the resampling filter on each side."""
_ROLL_OFF, _BETA = 0.945, 10.0
_PHASES = 256
_SILENCE = 1e-10
_AFTER = 2
"""Frames of silence that the tower's convolutions see after a sound."""
_PAUSE_S = 5.0
"""A long sound is cut in the quietest place of this long an end of each window."""
_QUIET = SAMPLE_RATE // 10
_EXTRA = "other files than WAV need: pip install 'banyan-serve[sound]'"


class BadSound(Exception):
    """The file is no sound that can be read; the text says why."""


def decoded_sound(task: SoundTask) -> DecodedSound:
    """The spectrograms of a task's file.

    Raises:
        BadSound: it cannot be read, or is too long.
    """
    most = task.max_windows * task.window * HOP
    samples = _samples(task.data, most / SAMPLE_RATE)
    if len(samples) > most:
        raise BadSound(_too_long(len(samples) / SAMPLE_RATE, most / SAMPLE_RATE))
    size = task.window * HOP
    cuts = _cuts(samples, size) if task.is_cut else [0, len(samples)]
    parts = [_part(samples[a:b], a, task) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    return DecodedSound(parts, len(samples) / SAMPLE_RATE)


def _part(samples: np.ndarray, start: int, task: SoundTask) -> SoundPart:
    windows = max(1, -(-len(samples) // (task.window * HOP)))
    frames = task.window if task.is_whole else max(1, -(-len(samples) // HOP))
    mel = log_mel(samples, task.bands, windows * task.window)
    if not task.is_whole:
        mel = mel[:, : min(frames + _AFTER, task.window)]
    mel = mel.reshape(task.bands, windows, -1).transpose(1, 0, 2)
    found = hashlib.sha256(f"sound {task.bands} {task.window} {int(task.is_whole)}\0".encode())
    found.update(np.ascontiguousarray(samples).tobytes())
    times = start / SAMPLE_RATE, (start + len(samples)) / SAMPLE_RATE
    data = mel.astype(np.float16).tobytes()
    return SoundPart(found.digest(), data, *times, windows, frames)


def _cuts(samples: np.ndarray, size: int) -> list[int]:
    """Where to cut so that each part has at most `size` samples: in pauses."""
    cuts, tail = [0], int(_PAUSE_S * SAMPLE_RATE)
    while len(samples) - cuts[-1] > size:
        first = cuts[-1] + size - min(tail, size // 2)
        part = samples[first : cuts[-1] + size] ** 2
        sums = np.concatenate([[0.0], np.cumsum(part, dtype=np.float64)])
        loudness = sums[_QUIET:] - sums[:-_QUIET] if len(sums) > _QUIET else sums[-1:]
        cuts.append(first + int(np.argmin(loudness)) + min(_QUIET, len(part)) // 2)
    return [*cuts, len(samples)]


def _samples(data: bytes, max_s: float) -> np.ndarray:
    """float32 samples of one channel at SAMPLE_RATE."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        values, rate = _of_wav(data, max_s)
    elif soundfile is None:
        raise BadSound(f"the {len(data):,} bytes are no WAV file; {_EXTRA}")
    else:
        values, rate = _of_soundfile(soundfile, data, max_s)
    if not len(values):
        raise BadSound("it has no samples")
    if not np.isfinite(values).all():
        raise BadSound("it has samples that are not finite")
    return resampled(values.mean(axis=1, dtype=np.float32), rate)


def _too_long(seconds: float, max_s: float) -> str:
    return f"it is {seconds:,.1f} s long, limit {max_s:,.0f} s"


def _check(rate: int, channels: int, frames: int, max_s: float) -> None:
    if not (1000 <= rate <= _MAX_RATE and 1 <= channels <= _MAX_CHANNELS):
        raise BadSound(
            f"it has {channels:,} channels at {rate:,} Hz; 1 to {_MAX_CHANNELS} channels at 1,000 "
            f"to {_MAX_RATE:,} Hz are read"
        )
    if frames > max_s * rate:
        raise BadSound(_too_long(frames / rate, max_s))


def _of_soundfile(library: Any, data: bytes, max_s: float) -> tuple[np.ndarray, int]:
    """float32 [frames, channels] and the rate."""
    try:
        with library.SoundFile(io.BytesIO(data)) as file:
            rate, channels = int(file.samplerate), int(file.channels)
            _check(rate, channels, max(0, int(file.frames)), max_s)
            # A header may lie about the length: read one frame more than may be there.
            values = file.read(int(max_s * rate) + 1, dtype="float32", always_2d=True)
    except BadSound:
        raise
    except Exception as error:  # any error of a decoder is the answer
        why = " ".join(str(error).split())[:160]
        raise BadSound(f"the {len(data):,} bytes are no sound that can be read: {why}") from None
    _check(rate, channels, len(values), max_s)
    return values, rate


def _of_wav(data: bytes, max_s: float) -> tuple[np.ndarray, int]:
    """float32 [frames, channels] and the rate."""
    form, body, at = b"", None, 12
    while at + 8 <= len(data) and body is None:
        name, (size,) = data[at : at + 4], struct.unpack_from("<I", data, at + 4)
        if name == b"fmt ":
            form = data[at + 8 : at + 8 + min(size, 40)]
        elif name == b"data":  # of unknown size when it was written as a stream
            body = data[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
    if len(form) < 16 or body is None:
        raise BadSound("its WAV header has no format or no data")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", form)
    if kind == _EXTENSIBLE and len(form) >= 26:
        (kind,) = struct.unpack_from("<H", form, 24)
    types = {(_PCM, 8): "u1", (_PCM, 16): "<i2", (_PCM, 32): "<i4"}
    types |= {(_FLOAT, 32): "<f4", (_FLOAT, 64): "<f8"}
    if (kind, bits) != (_PCM, 24) and (kind, bits) not in types:
        raise BadSound(f"its WAV coding {kind} with {bits} bits is not read; PCM and floats are")
    width = bits // 8
    frames = len(body) // (width * max(1, channels))
    _check(rate, channels, frames, max_s)
    body = body[: frames * channels * width]
    if kind == _PCM and bits == 24:
        raw = np.frombuffer(body, np.uint8).reshape(-1, 3)
        wide = np.zeros((len(raw), 4), np.uint8)
        wide[:, 1:] = raw
        values = wide.reshape(-1).view("<i4").astype(np.float32) / 2**31
    else:
        values = np.frombuffer(body, types[kind, bits]).astype(np.float32)
        if kind == _PCM:
            values = (values - 128) / 128 if bits == 8 else values / 2.0 ** (bits - 1)
    return values.reshape(frames, channels), rate


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """Samples at SAMPLE_RATE, by a windowed sinc filter. samples: float32 [n]."""
    if rate == SAMPLE_RATE:
        return samples
    common = math.gcd(rate, SAMPLE_RATE)
    up, down = SAMPLE_RATE // common, rate // common
    cutoff = _ROLL_OFF * min(1.0, up / down)
    half = math.ceil(_ZEROS / cutoff)
    count = -(-len(samples) * up // down)
    padded = np.pad(samples, (half, half + down + 1))
    out = np.zeros(count, np.float32)
    offsets = np.arange(-half + 1, half + 1)
    for first in range(0, min(up, count), _PHASES):
        phases = np.arange(first, min(first + _PHASES, up, count))
        distance = offsets - (phases * down % up / up)[:, None]
        taps = cutoff * np.sinc(cutoff * distance) * _kaiser(distance / half)
        for phase, mine in zip(phases.tolist(), taps.astype(np.float32), strict=True):
            base = phase * down // up + 1
            views = lib.stride_tricks.sliding_window_view(padded[base:], 2 * half)[::down]
            out[phase::up] = views[: len(out[phase::up])] @ mine
    return out


def _kaiser(place: np.ndarray) -> np.ndarray:
    """The Kaiser window at places -1 … 1."""
    return np.i0(_BETA * np.sqrt(np.clip(1 - place**2, 0, 1))) / np.i0(_BETA)


def log_mel(samples: np.ndarray, bands: int, frames: int) -> np.ndarray:
    """Whisper's log-mel spectrogram of the samples and silence after them, [bands, frames]."""
    length = frames * HOP
    half = _WINDOW // 2
    padded = np.zeros(length + _WINDOW, np.float32)
    padded[half : half + len(samples)] = samples[:length]
    padded[:half] = padded[half + 1 : _WINDOW + 1][::-1]  # reflected
    padded[half + length :] = padded[length - 1 : length + half - 1][::-1]
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)).astype(np.float32)
    filters = _filters(bands)
    views = lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::HOP]
    found = np.empty((bands, frames), np.float32)
    for first in range(0, frames, 3000):
        part = views[first : min(first + 3000, frames)] * window
        power = np.abs(fft.rfft(part, axis=1)) ** 2
        mel = np.maximum(power @ filters, _SILENCE)
        found[:, first : first + len(part)] = np.log10(mel).T
    return (np.maximum(found, found.max() - 8.0) + 4.0) / 4.0


@cache
def _filters(bands: int) -> np.ndarray:
    """Triangles on Slaney's mel scale, each of area one; [frequencies, bands]."""
    step = math.log(6.4) / 27
    top = 15 + math.log(SAMPLE_RATE / 2 / 1000) / step
    mels = np.linspace(0, top, bands + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(step * (mels - 15)))
    frequencies = np.linspace(0, SAMPLE_RATE / 2, _WINDOW // 2 + 1)
    distance = edges[:, None] - frequencies
    widths = np.diff(edges)[:, None]
    rising, falling = -distance[:-2] / widths[:-1], distance[2:] / widths[1:]
    weights = np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return weights.T
