"""Sound in prompts: the tokens of transformers, alone and in company; Whisper's rules."""

import asyncio
import json
import os
import wave
from array import array
from contextlib import aclosing
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, WhisperForConditionalGeneration
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from banyan.base.errors import RequestError
from banyan.base.ids import RequestId
from banyan.layers.build import Build
from banyan.llm import Engine
from banyan.media.processes import SoundTask
from banyan.media.sound import decoded_sound
from banyan.messages.events import Failed, Tokens
from banyan.messages.sampling_params import SamplingParams
from banyan.messages.spans import Content, ContentKind, Span
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_tower
from banyan.ops.bind import bind
from banyan.requests.request_spec import RequestSpec, spec_of
from banyan.runner.sampler import LogitContext, transcript_logits
from tests.support.sound import (
    BANDS,
    PAD,
    RATE,
    WINDOW,
    rounded_mel,
    samples,
    tiny_listener,
    tiny_whisper,
)
from tests.support.sound import wav as wav_file

FLAGS = {
    "engine_mode": "inprocess",
    "threads": 1,
    "page_size": 16,
    "cpu_activations": "fp32",
    "max_total_tokens": 2048,
}
OUTPUT = 10
GREEDY = {"temperature": 0.0, "max_new_tokens": OUTPUT, "ignore_eos": True}


def spec(name: str, mel: np.ndarray, ids: list[int], count: int = OUTPUT) -> RequestSpec:
    """A sequence of Whisper's over one window. mel: [bands, frames]."""
    data = mel.astype(np.float16).tobytes()
    digest = sha256(data).digest()
    grid = (1, *mel.shape)
    content = Content(digest, ContentKind.MEL, data, grid, mel.shape[1] // 2)
    span = Span(0, 1, digest, kind=ContentKind.MEL, token=ids[0])
    sampling = SamplingParams(max_new_tokens=count, temperature=0.0)
    return spec_of(RequestId(name), ids, sampling, spans=(span,), contents=(content,))


async def answer(engine: Engine, asked: RequestSpec) -> list[int]:
    tokens = array("i")
    async with aclosing(engine._live().client.submit(asked.message)) as events:
        async for event in events:
            if isinstance(event, Failed):
                raise RequestError(event.text, status=event.status, code=event.code)
            if isinstance(event, Tokens):
                tokens.frombytes(event.tokens)
    return tokens.tolist()


def ask(engine: Engine, asked: list[RequestSpec]) -> list[list[int]]:
    async def all_of_them() -> list[list[int]]:
        return list(await asyncio.gather(*(answer(engine, one) for one in asked)))

    return engine._loop.run(all_of_them())


def greedy(
    model: torch.nn.Module, mel: torch.Tensor, ids: list[int], count: int = OUTPUT
) -> list[int]:
    """Transformers' tokens."""
    found = torch.tensor([ids])
    with torch.no_grad():
        states = model.model.encoder(mel)
        for _ in range(count):
            logits = model(encoder_outputs=states, decoder_input_ids=found).logits
            found = torch.cat([found, logits[:, -1:].argmax(-1)], dim=1)
    return found[0, len(ids) :].tolist()


def test_whisper_has_the_tokens_of_transformers_alone_and_in_company(tmp_path) -> None:
    reference = tiny_whisper(tmp_path)
    cases = []
    for at, ids in enumerate(([258, 259, 262, 264], [263, 65, 66, 67, 258, 260, 262, 264], [258])):
        mel = rounded_mel(samples(1.0, at), 80, WINDOW)
        cases.append((mel, ids, greedy(reference, mel, ids)))
    assert len({tuple(tokens) for *_, tokens in cases}) == 3
    with Engine(str(tmp_path), **FLAGS) as engine:
        for at, (mel, ids, expected) in enumerate(cases):
            assert ask(engine, [spec(f"alone{at}", mel[0].numpy(), ids)]) == [expected]
        again = [
            spec(f"with{at}", cases[at % 3][0][0].numpy(), cases[at % 3][1]) for at in range(7)
        ]
        assert ask(engine, again) == [cases[at % 3][2] for at in range(7)]
        # The same words before another sound: nothing of the first one's cache is used.
        mel, ids = cases[1][0], cases[0][1]
        expected = greedy(reference, mel, ids)
        assert ask(engine, [spec("other", mel[0].numpy(), ids)]) == [expected]


def test_a_published_whisper_has_the_words_of_transformers() -> None:
    """Set BANYAN_TEST_MODELS to a folder with `whisper-base` and `speech.wav` (16 kHz)."""
    folder = Path(os.environ.get("BANYAN_TEST_MODELS", "nowhere"))
    if not (folder / "whisper-base").is_dir() or not (folder / "speech.wav").is_file():
        pytest.skip("no whisper-base and speech.wav: set BANYAN_TEST_MODELS")
    with wave.open(str(folder / "speech.wav")) as file:
        values = np.frombuffer(file.readframes(30 * RATE), "<i2").astype(np.float32) / 32768
    mel = rounded_mel(values, 80, 3000)
    reference = WhisperForConditionalGeneration.from_pretrained(folder / "whisper-base").eval()
    ids = [50258, 50259, 50359, 50363]
    expected = greedy(reference, mel, ids, 60)
    with Engine(str(folder / "whisper-base"), **FLAGS) as engine:
        assert ask(engine, [spec("speech", mel[0].numpy(), ids, 60)]) == [expected]


@pytest.mark.parametrize("family", ["qwen2_audio", "voxtral"])
def test_a_model_that_hears_has_the_tokens_of_transformers(family, tmp_path) -> None:
    reference = tiny_listener(family, tmp_path)
    sound = read_model_config(str(tmp_path)).media.sound
    seconds = 0.7 if family == "qwen2_audio" else 2.0
    values = samples(seconds)
    file = wav_file(values)
    values = np.frombuffer(file[44:], "<i2").astype(np.float32) / 32768
    windows = 1 if family == "qwen2_audio" else 2
    mel = rounded_mel(values, BANDS, windows * WINDOW)
    frames = -(-len(values) // 160) if family == "qwen2_audio" else WINDOW
    rows = sound.rows(windows, frames)
    ids = [7, 8, *[sound.token] * rows, 9, 10, 11]
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
    if family == "qwen2_audio":
        mask = (torch.arange(WINDOW) < frames).long().unsqueeze(0)
        inputs |= {"input_features": mel, "feature_attention_mask": mask}
    else:
        inputs["input_features"] = mel.view(BANDS, windows, WINDOW).transpose(0, 1)
    with torch.no_grad():
        found = reference.generate(
            **inputs, max_new_tokens=OUTPUT, do_sample=False, eos_token_id=None
        )
    expected = found[0, -OUTPUT:].tolist()
    with Engine(str(tmp_path), **FLAGS, chunked_prefill_size=16) as engine:
        for _ in range(2):  # the second time from the prefix cache
            got = engine.generate(
                input_ids=[7, 8, sound.token, 9, 10, 11], audio_data=file, sampling_params=GREEDY
            )
            assert got["output_ids"] == expected
        assert got["meta_info"]["prompt_tokens"] == len(ids)
        with pytest.raises(RequestError, match="takes no pictures"):
            engine.generate("a", image_data="https://a.org/b.png")
        with pytest.raises(RequestError, match="0 places for sounds, and 1 sounds came"):
            engine.generate("a", audio_data=file)
        with pytest.raises(RequestError, match="the sound is refused"):
            engine.generate(PAD, audio_data=wav_file(samples(1.3)) if windows == 1 else b"RIFF")


@pytest.mark.parametrize("family", ["qwen2_audio", "voxtral"])
def test_features_of_a_sound_are_the_same_bits_in_pieces(family, tmp_path) -> None:
    tiny_listener(family, tmp_path, seed=1)
    config = read_model_config(str(tmp_path))
    ops = bind("cpu", torch.device("cpu"), torch.float32, frozenset(), 16)
    tower = load_tower(config, Build(ops), kind=ContentKind.MEL)
    mel = rounded_mel(samples(1.0, 5), BANDS, WINDOW)

    def features(pieces: list[int]) -> torch.Tensor:
        state, first = tower.begin(mel, (1, BANDS, WINDOW)), 0
        for blocks in pieces:
            tower.run(state, first, blocks)
            first += blocks
        return tower.end(state)

    whole = features([3])
    assert whole.shape == (config.media.sound.rows(1, WINDOW), 64)
    assert torch.equal(features([1, 1, 1]), whole) and torch.equal(features([2, 1]), whole)


def test_time_stamps_follow_the_rules_of_transformers() -> None:
    first, end, no_times = 300, 257, 299
    config = GenerationConfig(eos_token_id=end, bos_token_id=256, no_timestamps_token_id=no_times)
    config.max_initial_timestamp_index = 50
    reference = WhisperTimeStampLogitsProcessor(config, begin_index=3)
    rules = {"first_time": first, "end": end, "no_times": no_times, "last_first": first + 50}
    draw = torch.Generator().manual_seed(0)
    for said in ([], [310], [310, 5], [310, 5, 6, 330], [310, 5, 330, 330], [310, 5, 330, 331, 7]):
        for _ in range(5):
            logits = torch.randn(640, generator=draw) * 3
            tokens = np.array([258, 259, 262, *said], np.int32)
            found = transcript_logits(logits.clone(), LogitContext(tokens, 3, rules))
            ids = torch.from_numpy(tokens.astype(np.int64)).unsqueeze(0)
            expected = reference(ids, logits.clone().unsqueeze(0))[0]
            assert torch.equal(found == -torch.inf, expected == -torch.inf), said


def test_windows_of_a_long_file_are_contents_of_their_own() -> None:
    file = wav_file(samples(3.0))
    found = decoded_sound(SoundTask(file, 80, WINDOW, is_cut=True, max_windows=9))
    assert len(found.parts) >= 3
    assert all(len(part.mel) == 2 * 80 * WINDOW for part in found.parts)
    assert json.dumps([part.end_s for part in found.parts[:-1]]) == json.dumps(
        [part.start_s for part in found.parts[1:]]
    )
