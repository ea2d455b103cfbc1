"""Files of sound: each coding, what is refused, and the spectrograms of transformers."""

import asyncio
import struct

import numpy as np
import pytest

from banyan.base.errors import RequestError
from banyan.config.schema import MediaOptions
from banyan.media.parts import MediaPart
from banyan.media.preparation import MediaService
from banyan.media.processes import SoundTask
from banyan.media.sound import BadSound, decoded_sound, log_mel, resampled
from banyan.model_config.media import MediaConfig, SoundConfig, SoundTowerConfig
from tests.support.pictures import byte_tokenizer
from tests.support.sound import RATE, rounded_mel, samples, wav, wav_of

TOWER = SoundTowerConfig(blocks=1, width=8, heads=1, inner=8, out=8, pool=2, window=200)


def task(data: bytes, **more: object) -> SoundTask:
    return SoundTask(data, **{"bands": 80, "window": 200, **more})


@pytest.mark.parametrize("bands", [80, 128])
@pytest.mark.parametrize("seconds", [0.013, 0.5, 1.9])
def test_spectrograms_equal_those_of_transformers(bands: int, seconds: float) -> None:
    values = samples(seconds)
    found = log_mel(values, bands, 200)
    expected = rounded_mel(values, bands, 200)[0].numpy()
    assert np.abs(found - expected).max() < 2e-3  # the rounding to float16


@pytest.mark.parametrize(
    ("kind", "bits", "pack"),
    [
        (1, 8, lambda v: (v * 127 + 128).astype("u1").tobytes()),
        (1, 16, lambda v: (v * 32767).astype("<i2").tobytes()),
        (1, 24, lambda v: b"".join(struct.pack("<i", int(x * 8388607))[:3] for x in v)),
        (1, 32, lambda v: (v.astype("f8") * 2147483647).astype("<i4").tobytes()),
        (3, 32, lambda v: v.astype("<f4").tobytes()),
        (3, 64, lambda v: v.astype("<f8").tobytes()),
    ],
)
def test_every_coding_of_wav_gives_the_same_spectrogram(kind, bits, pack) -> None:
    values = samples(0.3)
    found = decoded_sound(task(wav_of(kind, bits, pack(values)))).parts[0]
    mel = np.frombuffer(found.mel, np.float16).reshape(80, 200)
    assert np.abs(mel - log_mel(values, 80, 200)).max() < (0.5 if bits == 8 else 0.02)
    assert found.frames == 200 and found.end_s == pytest.approx(0.3)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_a_tone_keeps_its_pitch_and_loudness_at_any_rate(rate: int) -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(rate // 2) / rate).astype(np.float32)
    found = resampled(tone, rate)
    expected = np.sin(2 * np.pi * 440 * np.arange(len(found)) / RATE)
    assert len(found) == 8000
    assert np.abs(found - expected)[200:-200].max() < 1e-4


def test_what_is_above_the_new_rate_does_not_come_back_as_another_tone() -> None:
    tone = np.sin(2 * np.pi * 12_000 * np.arange(24_000) / 48_000).astype(np.float32)
    assert np.abs(resampled(tone, 48_000)[200:-200]).max() < 1e-4


def test_channels_are_mixed() -> None:
    left, right = samples(0.2, 1), samples(0.2, 2)
    both = decoded_sound(task(wav(np.stack([left, right], axis=1)))).parts[0].mel
    mixed = log_mel((left + right) / 2, 80, 200)
    assert np.abs(np.frombuffer(both, np.float16).reshape(80, 200) - mixed).max() < 0.02


def test_a_long_sound_is_cut_in_its_pauses() -> None:
    pause = np.zeros(RATE // 4, np.float32)
    values = np.concatenate([samples(1.6, 1), pause, samples(1.5, 2), pause, samples(0.7, 3)])
    found = decoded_sound(task(wav(values), is_cut=True, max_windows=4))
    assert [part.start_s for part in found.parts] == pytest.approx([0, 1.72, 3.47], abs=0.15)
    assert found.parts[-1].end_s == found.seconds == pytest.approx(len(values) / RATE)
    assert len({part.digest for part in found.parts}) == 3


NOISE = samples(0.1).tobytes()
BAD = {
    "nothing": b"",
    "text": b"this is a sound, believe me",
    "a name": b"RIFF\0\0\0\0WAVE",
    "no data": wav(samples(0.1))[:36],
    "no samples": wav_of(1, 16, b""),
    "no channels": wav_of(1, 16, NOISE, channels=0),
    "65,535 channels": wav_of(1, 16, NOISE, channels=65535),
    "a rate of 0": wav_of(1, 16, NOISE, rate=0),
    "a rate of 2^32 - 1": wav_of(1, 16, NOISE, rate=2**32 - 1),
    "no bits": wav_of(1, 0, NOISE),
    "ADPCM": wav_of(2, 4, NOISE),
    "infinite samples": wav_of(3, 32, np.full(100, np.inf, "<f4").tobytes()),
    "too long": wav(samples(2.2)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(BadSound, match=r"[a-z]{3}"):
        decoded_sound(task(BAD[name]))


def listener(**more: object) -> MediaService:
    sound = SoundConfig(256, TOWER, is_whole=False)
    media = MediaOptions(**{"timeout_s": 0, **more})
    return MediaService(MediaConfig(sound=sound), media, byte_tokenizer("<|AUDIO|>"), 4096)


def prepared(service: MediaService, data: bytes):
    part = MediaPart("audio", data, "messages[0].content[0]")
    try:
        return asyncio.run(service.prepare([part]))[part.key]
    finally:
        service.close()


def test_a_worker_process_makes_a_content_of_a_sound() -> None:
    item = prepared(listener(), wav(samples(0.5)))
    assert item.content.grid == (1, 128, 50) and item.content.rows == 12
    assert item.stretch == (256,) * 12 and item.placeholder == 256
    assert len(item.content.data) == 2 * 128 * 52


@pytest.mark.parametrize("name", ["text", "too long", "65,535 channels"])
def test_a_request_with_a_bad_file_is_a_clear_refusal(name: str) -> None:
    with pytest.raises(RequestError, match="the sound is refused") as caught:
        prepared(listener(), BAD[name])
    assert caught.value.status == 400 and caught.value.code == "invalid_audio"
