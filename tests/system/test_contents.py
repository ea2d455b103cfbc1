"""Prompts with contents: the same answers as transformers, and the same bits in any company."""

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from msgspec import structs

from banyan.base.errors import BanyanError, RequestError
from banyan.base.ids import RequestId
from banyan.llm import Engine
from banyan.messages.events import Failed, Tokens
from banyan.messages.sampling_params import SamplingParams
from banyan.messages.spans import Content, ContentKind, Span
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.media import MediaConfig
from banyan.requests.request_spec import RequestSpec, ScoreOptions, spec_of
from banyan.scheduler.spans import last_end
from tests.support.multimodal import normalized, random_content, tiny

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3")
FLAGS = {
    "engine_mode": "inprocess",
    "threads": 1,
    "page_size": 16,
    "cpu_activations": "fp32",
    "max_total_tokens": 4096,
    "context_length": 512,
}
GRIDS = ((1, 8, 12), (1, 6, 4))
SQUARES = ((1, 6, 6), (1, 6, 6))
"""Of Gemma 3, whose tokens of one content see each other."""
OUTPUT = 8


@dataclass(frozen=True)
class Prompt:
    """Ids with placeholders, and what is in their place: (first, grid, pixels)."""

    media: MediaConfig
    ids: list[int]
    items: list[tuple[int, tuple[int, int, int], torch.Tensor]]

    def spec(self, name: str, count: int = OUTPUT) -> RequestSpec:
        spans, contents = [], {}
        merge, is_mutual = self.media.tower.merge, self.media.is_mutual
        for first, grid, pixels in self.items:
            rows = rows_of(self.media, grid)
            data = pixels.numpy().tobytes()
            digest = sha256(data).digest()
            shape = (1, grid[1] // merge, grid[2] // merge)
            kind = ContentKind.PATCHES
            spans.append(Span(first, rows, digest, shape=shape, kind=kind, is_mutual=is_mutual))
            contents[digest] = Content(digest, ContentKind.PATCHES, data, grid, rows)
        sampling = SamplingParams(max_new_tokens=count, temperature=0.0)
        given = {"spans": tuple(spans), "contents": tuple(contents.values())}
        scores = ScoreOptions(len(self.ids), 2)
        return spec_of(RequestId(name), self.ids, sampling, scores=scores, **given)


def rows_of(media: MediaConfig, grid: tuple[int, int, int]) -> int:
    return grid[1] * grid[2] // media.tower.merge**2


def prompt_of(media: MediaConfig, seed: int = 0, text: int = 11) -> Prompt:
    """Two contents with text before, between and after them; the first comes twice."""
    values = 3 * media.tower.temporal_patch * media.tower.patch**2
    grids = SQUARES if media.is_mutual else GRIDS
    pixels = [random_content(grid[1] * grid[2], values, seed + at) for at, grid in enumerate(grids)]
    ids, items = [7 + i * 5 % 200 for i in range(text)], []
    for at in (0, 1, 0):
        items.append((len(ids), grids[at], pixels[at]))
        ids += [media.image_token] * rows_of(media, grids[at]) + [40 + at + seed, 41, 42]
    return Prompt(media, ids, items)


@dataclass(frozen=True)
class Found:
    tokens: list[int]
    scores: bytes
    cached: int


async def answer(engine: Engine, spec: RequestSpec) -> Found:
    tokens = array("i")
    scores, cached = b"", 0
    async with aclosing(engine._live().client.submit(spec.message)) as events:
        async for event in events:
            if isinstance(event, Failed):
                raise RequestError(event.text, status=event.status, code=event.code)
            cached = event.cached_tokens
            if isinstance(event, Tokens):
                tokens.frombytes(event.tokens)
                scores += b"".join(score.logprobs for score in event.scores)
    return Found(tokens.tolist(), scores, cached)


def ask(engine: Engine, specs: Sequence[RequestSpec]) -> list[Found]:
    """Answer all at the same time."""

    async def all_of_them() -> list[Found]:
        return list(await asyncio.gather(*(answer(engine, spec) for spec in specs)))

    return engine._loop.run(all_of_them())


@pytest.fixture(params=FAMILIES, scope="module")
def model(request, tmp_path_factory) -> tuple[Path, MediaConfig, torch.nn.Module]:
    folder = tmp_path_factory.mktemp(request.param)
    reference = tiny(request.param, folder)
    media = read_model_config(str(folder)).media
    assert media is not None
    return folder, media, reference


@pytest.fixture(scope="module")
def engine(model) -> Iterator[Engine]:
    with Engine(str(model[0]), **FLAGS, chunked_prefill_size=256) as it:
        yield it


@pytest.fixture(scope="module")
def alone(model, engine) -> Found:
    return ask(engine, [prompt_of(model[1]).spec("alone")])[0]


def expected(model, prompt: Prompt) -> tuple[list[int], list[float]]:
    """Greedy tokens of transformers, and their log-probabilities."""
    _, media, reference = model
    mean, std = media.tower.mean, media.tower.std
    pixels = torch.cat([normalized(p, mean, std) for _, _, p in prompt.items])
    ids = torch.tensor([prompt.ids])
    kinds = (ids == media.image_token).int()
    if media.is_mutual:
        ids[kinds == 1] = reference.config.image_token_id
        squares = pixels.view(-1, 6, 6, 3, 14, 14).permute(0, 3, 1, 4, 2, 5)
        inputs = {"pixel_values": squares.reshape(-1, 3, 84, 84), "token_type_ids": kinds}
    else:
        grids = torch.tensor([grid for _, grid, _ in prompt.items])
        inputs = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
    with torch.no_grad():
        answer = reference.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **inputs,
            max_new_tokens=OUTPUT,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = answer.sequences[0, len(prompt.ids) :].tolist()
    scores = [
        logits[0].log_softmax(-1)[token].item()
        for logits, token in zip(answer.logits, tokens, strict=True)
    ]
    return tokens, scores


def test_answers_and_their_scores_are_those_of_transformers(model, engine, alone):
    tokens, scores = expected(model, prompt_of(model[1]))
    assert alone.tokens == tokens
    found = torch.frombuffer(bytearray(alone.scores), dtype=torch.float32)
    assert (found - torch.tensor(scores)).abs().max() < 1e-4


def test_prefix_hits_before_inside_and_after_a_span_change_no_bit(model, engine, alone):
    prompt = prompt_of(model[1])
    for end in (5, 20, 36, 60, len(prompt.ids) - 1):
        assert engine.flush_cache()
        media, ids = model[1], prompt.ids[:end]
        items = [item for item in prompt.items if item[0] + rows_of(media, item[1]) <= end]
        cut = [i for i, _ in enumerate(ids) if ids[i] == model[1].image_token]
        inside = [i for f, g, _ in items for i in range(f, f + rows_of(media, g))]
        if set(cut) - set(inside):  # a prompt that ends inside of a span: the whole one, cut short
            continue
        ask(engine, [Prompt(media, ids, items).spec(f"before {end}", 1)])
        spec = prompt.spec(f"after {end}")
        again = ask(engine, [spec])[0]
        cached = (len(ids) - 1) // 16 * 16
        while (reached := last_end(spec.message.spans, cached)) < cached:
            cached = reached // 16 * 16
        assert again.cached >= cached
        assert (again.tokens, again.scores) == (alone.tokens, alone.scores)


def test_another_content_is_never_found(model, engine, alone):
    prompt = prompt_of(model[1], seed=9)
    ask(engine, [prompt_of(model[1]).spec("first")])
    found = ask(engine, [prompt.spec("second")])[0]
    assert found.cached <= 11, "only the text before the first span"
    tokens, _ = expected(model, prompt)
    assert found.tokens == tokens


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_of_any_size_and_company_change_no_bit(model, alone, chunk):
    folder, media, _ = model
    with Engine(str(folder), **FLAGS, chunked_prefill_size=chunk) as engine:
        specs = [prompt_of(media).spec("wanted")]
        specs += [prompt_of(media, seed, 3 + seed).spec(f"other {seed}") for seed in (20, 30)]
        if media.is_mutual and chunk < 9:
            with pytest.raises(RequestError, match="Raise --chunked-prefill-size"):
                ask(engine, specs)
            return
        found = ask(engine, specs)[0]
    assert (found.tokens, found.scores) == (alone.tokens, alone.scores)


def test_retracted_prompts_are_computed_again(model, alone):
    folder, media, _ = model
    small = FLAGS | {"max_total_tokens": 200, "schedule_conservativeness": 0.0}
    with Engine(str(folder), **small, chunked_prefill_size=32) as engine:
        specs = [prompt_of(media).spec("wanted", 40)]
        specs += [prompt_of(media, seed, 3 + seed).spec(f"other {seed}", 40) for seed in (20, 30)]
        found = ask(engine, specs)
        assert engine.stats().retractions > 0
    assert found[0].tokens[:OUTPUT] == alone.tokens


@pytest.mark.parametrize(
    "more",
    [
        {"num_continuous_decode_steps": 4},
        {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4},
        {"disable_radix_cache": True},
        {"chunked_prefill_size": -1},
        {"disable_overlap_schedule": True},
    ],
    ids=lambda more: next(iter(more)),
)
def test_every_way_to_run_steps_gives_the_same_bits(model, alone, more):
    folder, media, _ = model
    with Engine(str(folder), **(FLAGS | {"chunked_prefill_size": 64} | more)) as engine:
        specs = [prompt_of(media).spec("wanted"), prompt_of(media, 20, 6).spec("other")]
        found = ask(engine, specs)[0]
    assert (found.tokens, found.scores) == (alone.tokens, alone.scores)


@pytest.mark.parametrize("parallel", ["tp_size", "pp_size"])
def test_ranks_agree_on_contents(model, alone, parallel):
    folder, media, _ = model
    if parallel == "pp_size" and media.tower.deep_blocks:
        with pytest.raises(BanyanError, match="2 layers take features, and the first of 2"):
            Engine(str(folder), **(FLAGS | {"engine_mode": "normal", parallel: 2}))
        return
    flags = FLAGS | {"engine_mode": "normal", parallel: 2, "chunked_prefill_size": 16}
    with Engine(str(folder), **flags) as engine:
        specs = [prompt_of(media).spec("wanted"), prompt_of(media, 20, 6).spec("other")]
        found = ask(engine, specs)[0]
        assert_bad_content_fails_alone(engine, media, found)
    assert found.tokens == alone.tokens
    ours, theirs = (
        torch.frombuffer(bytearray(each.scores), dtype=torch.float32) for each in (alone, found)
    )
    assert (ours - theirs).abs().max() < 1e-4


def assert_bad_content_fails_alone(engine: Engine, media: MediaConfig, alone: Found) -> None:
    bad = prompt_of(media, seed=50).spec("bad")
    first = bad.message.contents[0]
    cut = structs.replace(first, data=first.data[:-7])
    bad = bad.with_message(contents=(cut, *bad.message.contents[1:]))
    assert engine.flush_cache()

    async def both() -> list[Found | BaseException]:
        good = prompt_of(media).spec("good")
        return await asyncio.gather(
            *(answer(engine, spec) for spec in (bad, good)), return_exceptions=True
        )

    refused, found = engine._loop.run(both())
    assert isinstance(refused, RequestError) and refused.status == 400
    assert isinstance(found, Found)
    assert (found.tokens, found.scores) == (alone.tokens, alone.scores)


def test_a_content_that_cannot_be_read_fails_its_request_alone(model, engine, alone):
    assert_bad_content_fails_alone(engine, model[1], alone)
    again = prompt_of(model[1], seed=50)
    assert ask(engine, [again.spec("whole")])[0].tokens == expected(model, again)[0]


def test_data_that_is_not_there_any_more_is_asked_for(model, engine):
    spec = prompt_of(model[1], seed=60).spec("bare")
    bare = tuple(structs.replace(each, data=b"") for each in spec.message.contents)
    with pytest.raises(RequestError, match="does not have a content") as caught:
        ask(engine, [spec.with_message(contents=bare)])
    assert (caught.value.status, caught.value.code) == (409, "content_unknown")
    whole = ask(engine, [spec])[0]
    again = ask(engine, [spec.with_message(request=RequestId("known"), contents=bare)])[0]
    assert (again.tokens, again.scores) == (whole.tokens, whole.scores)


def test_scores_of_the_prompt_count_placeholders(model, engine, alone):
    prompt = prompt_of(model[1])
    spec = prompt.spec("scored").with_message(score_from=1)
    found = ask(engine, [spec])[0]
    assert found.tokens == alone.tokens
    assert len(found.scores) // 4 == len(prompt.ids) - 1 + OUTPUT
    assert found.scores[-len(alone.scores) :] == alone.scores
