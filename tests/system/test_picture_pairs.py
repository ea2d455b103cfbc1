"""Pictures next to everything else that a request may ask for: on one engine, and over a pair of
engines that share the work, the answers are the same bits."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from banyan.base.errors import BanyanError
from banyan.llm import Engine
from tests.support.handoff import CASES, GREEDY, is_whole, output_of
from tests.support.multimodal import RECIPES, tiny
from tests.system.handing import FLAGS, WAIT_S, Pair, engines
from tests.system.serving import wait_until

MORE = {"mm_per_request_timeout": 0, "enable_return_hidden_states": True}
SMALL = MORE | {"chunked_prefill_size": 16}
"""Steps that hold no picture of Qwen3-VL as a whole, and one of Gemma 3."""
HIDDEN = {"sampling_params": GREEDY, "return_hidden_states": True}


def picture(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3"])
def model(request, tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp(request.param)
    tiny(request.param, folder)
    return folder, RECIPES[request.param].image


@pytest.fixture(scope="module")
def single(model) -> Iterator[Engine]:
    with Engine(str(model[0]), **FLAGS, **MORE) as engine:
        yield engine


@pytest.fixture(scope="module")
def pair(model) -> Iterator[Pair]:
    with engines(model[0], SMALL, MORE) as found:
        yield found


def body_of(model: tuple[Path, str], first: int, second: int = 60) -> dict[str, object]:
    text = f"Hello {model[1]} and {model[1]} what?"
    return {"prompt": text, "image_data": [picture(first, 100), picture(second, 60)]}


@pytest.mark.parametrize("case", CASES)
def test_a_pair_answers_about_pictures_like_one_server(model, single, pair, case: str) -> None:
    body = body_of(model, 140) | CASES[case]
    right, found = single.generate(**body), pair.ask(**body)
    if isinstance(right, list):
        assert [output_of(x) for x in found] == [output_of(x) for x in right]
    else:
        assert output_of(found) == output_of(right)


def test_prefixes_with_pictures_on_either_side_change_no_answer(model, single, pair) -> None:
    body = body_of(model, 150) | CASES["scores"]
    right = output_of(single.generate(**body))
    assert [output_of(pair.ask(**body)) for _ in range(2)] == [right, right]
    other = body_of(model, 150, 70) | CASES["scores"]
    assert output_of(pair.ask(**other)) == output_of(single.generate(**other)) != right


def test_a_picture_that_cannot_be_read_ends_on_both_sides(model, single, pair) -> None:
    body = body_of(model, 140) | {"image_data": ["/nowhere/at/all.png", picture(60, 60)]}
    for future in pair.start(**body, sampling_params=GREEDY):
        with pytest.raises(BanyanError):
            future.result(WAIT_S)
    wait_until(lambda: is_whole(pair.prefill) and is_whole(pair.decode), WAIT_S, "whole again")


def test_hidden_states_over_pictures_are_those_of_any_chunks(model, single) -> None:
    body = body_of(model, 130) | HIDDEN
    assert single.flush_cache()
    whole = single.generate(**body)
    with Engine(str(model[0]), **FLAGS, **SMALL) as engine:
        found = engine.generate(**body)
    assert found["output_ids"] == whole["output_ids"]
    mine, theirs = (each["meta_info"]["hidden_states"] for each in (found, whole))
    assert mine == theirs
    places = len(mine[0]) if isinstance(mine[0][0], list) else len(mine)
    assert places >= whole["meta_info"]["prompt_tokens"]


def test_turns_of_a_session_bring_the_pictures_of_all_turns(model, single) -> None:
    image, (first, second) = model[1], (picture(90, 90), picture(75, 60))
    session = single.open_session(4096)
    params = {"sampling_params": GREEDY}
    turn = single.generate(
        f"See {image} now", image_data=[first], session_params={"id": session}, rid="1", **params
    )
    again = {"session_params": {"id": session, "rid": "1"}, **params}
    with pytest.raises(BanyanError, match="picture"):
        single.generate(" and more", **again)
    found = single.generate(f" and {image}", image_data=[first, second], **again)
    assert found["meta_info"]["prompt_tokens"] > turn["meta_info"]["prompt_tokens"]
    assert found["meta_info"]["cached_tokens"] >= turn["meta_info"]["prompt_tokens"] // 2
