"""Pairs of servers whose pages have different sizes: they are cut on their way, answers stay."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan.base.errors import BanyanError
from banyan.llm import Engine
from tests.models.families import tiny
from tests.support.handoff import CASES, GREEDY, PROMPT, is_whole
from tests.support.hidden_drafts import with_words
from tests.system.handing import FLAGS, WAIT_S, Pair, engines
from tests.system.serving import wait_until
from tests.system.test_handoff_ranks import TP2, output_of

ALL = bool(os.environ.get("PARALLEL"))
SIZES = [(16, 64), (64, 16), (16, 128), (128, 16), (64, 128), (128, 64)] if ALL else [(64, 16)]
"""Of prefill, and of decode."""


def computed(engine: Engine) -> int:
    (state,) = engine.get_server_info()["internal_states"]
    return state["stats"]["computed_tokens"]


def settle(pair: Pair) -> None:
    wait_until(lambda: is_whole(pair.prefill) and is_whole(pair.decode), WAIT_S, "all pages back")


@pytest.fixture(scope="module", params=SIZES, ids=str)
def pair(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Pair]:
    """Pieces of a prompt end within pages of either side."""
    first, second = ({"page_size": size} for size in request.param)
    with engines(tiny_model, {**first, "chunked_prefill_size": 64}, second) as found:
        found.sizes = request.param
        yield found


@pytest.mark.parametrize("case", [x for x in CASES if ALL or x != "a schema"])
def test_sizes_that_differ_answer_like_one_server(pair: Pair, single: Engine, case: str) -> None:
    for length in (3, 64, 130, 300) if ALL else (130,):
        body = {"input_ids": [(x + length) % 390 + 5 for x in PROMPT[:length]], **CASES[case]}
        right, found = single.generate(**body), pair.ask(**body)
        both = (right, found) if isinstance(right, list) else ([right], [found])
        assert [output_of(x) for x in both[1]] == [output_of(x) for x in both[0]], length
        if body.get("return_logprob"):
            assert scores(found) == pytest.approx(scores(right), abs=1e-4)
    settle(pair)


def scores(answer: dict) -> list[float]:
    meta = answer["meta_info"]
    of_prompt = [x for x, *_ in meta.get("input_token_logprobs") or [] if x is not None]
    return [*of_prompt, *(x for x, *_ in meta["output_token_logprobs"])]


def test_prefixes_that_either_side_has_are_not_asked_for_again(pair: Pair, single: Engine) -> None:
    first, second = pair.sizes
    rest = lambda n: n - n // first * first // second * second  # noqa: E731
    prompt = [(x * 3) % 390 + 7 for x in PROMPT]
    for length, cached in ((200, 0), (300, 200), (300, 300)):
        body = {"input_ids": prompt[:length], "sampling_params": GREEDY}
        settle(pair)
        before = computed(pair.decode)
        found = pair.ask(**body)
        assert output_of(found) == output_of(single.generate(**body))
        assert found["meta_info"]["cached_tokens"] >= cached // 128 * 128, "of the prefill server"
        settle(pair)
        assert computed(pair.decode) - before <= rest(length) + 8 + 1
    pair.decode.flush_cache()
    assert output_of(pair.ask(**body)) == output_of(single.generate(**body))
    pair.prefill.flush_cache()
    assert output_of(pair.ask(**body)) == output_of(single.generate(**body))
    settle(pair)


RIGHT_SIZES = ((16, 64), (64, 16)) if ALL else ((16, 64),)
KINDS = {
    "a window": ("gemma2", {}),
    "a latent": ("deepseek v3", {}),
    "an indexer": ("deepseek v3.2", {}),
    "states": ("qwen3 next", {"cpu_activations": "fp32"}),
    "int8 pages": ("", {"kv_cache_dtype": "int8"}),
    "fp8 pages": ("", {"kv_cache_dtype": "fp8_e4m3"}),
    "weights of 8 bits": ("", {"quantization": "int8"}),
    "plain kernels": ("", {"attention_backend": "torch_native"}),
}
LAYOUTS = {"1 to 1": ({}, {}), "1 to 2": ({}, TP2), "2 to 1": (TP2, {})}
FEW = [("a window", "1 to 1")]
MOST = [(kind, layout) for kind in KINDS for layout in LAYOUTS]


def written(kind: str, tiny_model: Path, folder: Path) -> tuple[Path, dict[str, object]]:
    """A model that keeps this, and the flags of whoever serves it."""
    family, flags = KINDS[kind]
    if not family:
        return tiny_model, flags
    tiny(family, folder, max_position_embeddings=2048, eos_token_id=None)
    return folder, {**flags, "skip_tokenizer_init": True}


@pytest.mark.parametrize(("kind", "layout"), MOST if ALL else FEW)
def test_pages_of_all_kinds_and_ranks_are_cut(
    kind: str, layout: str, tiny_model: Path, tmp_path: Path
) -> None:
    model, flags = written(kind, tiny_model, tmp_path / "model")
    prompts = [[2 + (7 * i * i + k) % 60 for i in range(n)] for k, n in enumerate((300, 256, 90))]
    asked = [{"input_ids": p, "sampling_params": GREEDY} for p in (*prompts, prompts[0])]
    with Engine(str(model), **FLAGS, **flags) as alone:
        right = [output_of(alone.generate(**body)) for body in asked]
    prefill, decode = LAYOUTS[layout]
    sizes = [*RIGHT_SIZES, (1, 16), (16, 1)] if kind == "plain kernels" else RIGHT_SIZES
    for one, two in sizes:
        giving = {**prefill, **flags, "page_size": one, "chunked_prefill_size": 64}
        with engines(model, giving, {**decode, **flags, "page_size": two}) as both:
            assert [output_of(both.ask(**body)) for body in asked] == right
            settle(both)
            before = computed(both.decode)
            fresh = {"input_ids": [3, *prompts[0]], "sampling_params": GREEDY}
            both.ask(**fresh)
            settle(both)
            assert computed(both.decode) - before < 64 + 16, "the prompt came"


def test_what_is_not_cut_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    """A draft model's layers keep what the model made of the last token of each page."""
    drafts = {"speculative_algorithm": "NEXTN"}
    model = with_words("deepseek v3", tmp_path / "model", tiny_model)
    with engines(model, {**drafts, "page_size": 32}, drafts) as uneven:
        _, second = uneven.start(input_ids=PROMPT, sampling_params=GREEDY)
        why = "the page size, which cannot be cut here, differs: 32 there, 16 here"
        with pytest.raises(BanyanError, match=why):
            second.result(WAIT_S)


@pytest.mark.skipif(not ALL, reason="make test-parallel")
def test_states_that_lie_otherwise_are_refused_by_name(tmp_path: Path) -> None:
    tiny("qwen3 next", tmp_path, max_position_embeddings=2048)
    plain = {"skip_tokenizer_init": True}
    with engines(tmp_path, {**plain, "mamba_track_interval": 64}, plain) as uneven:
        _, second = uneven.start(input_ids=[5] * 80, sampling_params=GREEDY)
        why = "the number of tokens between states differs: 64 there, 256 here"
        with pytest.raises(BanyanError, match=why):
            second.result(WAIT_S)
