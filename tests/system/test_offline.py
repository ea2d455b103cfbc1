"""The offline engine: batches, streams, both ways to run it, and an end without remains."""

import asyncio
import threading
from pathlib import Path

import psutil
import pytest

from banyan.base.errors import BanyanError
from banyan.llm import Engine
from tests.system.serving import open_files, runs, wait_until

PARAMS = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def start(model: Path, **flags: object) -> Engine:
    return Engine(
        model_path=str(model), threads=1, max_total_tokens=4096, log_level="error", **flags
    )


@pytest.fixture(scope="module")
def engine(tiny_model: Path):
    with start(tiny_model) as running:
        yield running


def test_one_prompt_gives_one_answer_and_a_list_gives_a_list(engine):
    one = engine.generate(prompt="The banyan grows", sampling_params=PARAMS)
    many = engine.generate(prompt=["The banyan grows", "A server"], sampling_params=PARAMS)
    assert one["text"] == many[0]["text"]
    assert len(many) == 2 and many[1]["text"] != one["text"]
    assert len(one["output_ids"]) == one["meta_info"]["completion_tokens"] == 12
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


def test_every_prompt_may_have_its_own_parameters(engine):
    answers = engine.generate(
        prompt=["The banyan grows", "The banyan grows"],
        sampling_params=[PARAMS, PARAMS | {"max_new_tokens": 3}],
    )
    assert [len(a["output_ids"]) for a in answers] == [12, 3]
    assert answers[0]["output_ids"][:3] == answers[1]["output_ids"]


def test_a_stream_grows_into_the_whole_answer(engine):
    long = PARAMS | {"max_new_tokens": 200, "ignore_eos": True}  # too long to come in one piece
    whole = engine.generate(prompt="The banyan grows", sampling_params=long)
    chunks = list(engine.generate(prompt="The banyan grows", sampling_params=long, stream=True))
    assert len(chunks) > 1
    assert chunks[-1]["text"] == whole["text"]
    texts = [c["text"] for c in chunks]
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))


def test_a_stream_that_is_given_up_frees_its_request(engine):
    long = PARAMS | {"max_new_tokens": 1500}
    stream = engine.generate(prompt="The banyan grows", sampling_params=long, stream=True)
    next(iter(stream))
    stream.close()
    wait_until(lambda: stats(engine)["running"] == 0, 60.0, "the request to end")
    assert stats(engine)["held_pages"] == 0


def test_several_answers_to_one_prompt_differ_and_repeat_by_seed(engine):
    params = PARAMS | {"n": 3, "temperature": 1.0, "sampling_seed": 11}
    first = engine.generate(prompt="The banyan grows", sampling_params=params)
    again = engine.generate(prompt="The banyan grows", sampling_params=params)
    texts = [a["text"] for a in first]
    assert len(set(texts)) == 3
    assert texts == [a["text"] for a in again]


def test_a_bad_request_raises_and_the_engine_goes_on(engine):
    with pytest.raises(BanyanError, match="temperature"):
        engine.generate(prompt="x", sampling_params={"temperature": -1})
    assert engine.generate(prompt="x", sampling_params=PARAMS)["text"]


def test_async_generation_serves_many_at_once(tiny_model):
    async def main() -> list[dict]:
        prompts = [f"number {i}" for i in range(8)]
        return await asyncio.gather(
            *(engine.async_generate(prompt=p, sampling_params=PARAMS) for p in prompts)
        )

    with start(tiny_model) as engine:
        answers = asyncio.run(main())
        alone = [engine.generate(prompt=f"number {i}", sampling_params=PARAMS) for i in range(8)]
    assert [a["text"] for a in answers] == [a["text"] for a in alone]


def test_an_engine_in_this_process_answers_the_same_and_starts_no_process(tiny_model, engine):
    expected = engine.generate(prompt="The banyan grows", sampling_params=PARAMS)["output_ids"]
    children = psutil.Process().children(recursive=True)
    with start(tiny_model, engine_mode="inprocess") as inside:
        assert set(psutil.Process().children(recursive=True)) <= set(children)
        answer = inside.generate(prompt="The banyan grows", sampling_params=PARAMS)
    assert answer["output_ids"] == expected


@pytest.mark.parametrize("mode", ["normal", "inprocess"])
def test_shutdown_leaves_no_process_thread_or_descriptor(tiny_model, mode):
    # The first engine in this process loads libraries that keep threads and files of their own.
    for _ in range(2):
        processes = {p.pid for p in psutil.Process().children(recursive=True)}
        threads, files = set(threading.enumerate()), open_files(psutil.Process().pid)
        running = start(tiny_model, engine_mode=mode)
        running.generate(prompt="x", sampling_params=PARAMS)
        running.shutdown()
        running.shutdown()

    def is_clean() -> bool:
        return (
            {p.pid for p in psutil.Process().children(recursive=True)} <= processes
            and set(threading.enumerate()) <= threads
            and open_files(psutil.Process().pid) <= files
        )

    wait_until(is_clean, 60.0, "the last thread to end")


def test_a_model_that_cannot_be_loaded_raises_and_leaves_no_process(tmp_path):
    before = psutil.Process().children(recursive=True)
    with pytest.raises(BanyanError, match="nothing-here"):
        Engine(model_path=str(tmp_path / "nothing-here"), offline=True)
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def stats(engine: Engine) -> dict:
    return engine.get_server_info()["internal_states"][0]["stats"]


def test_a_killed_engine_is_an_error_that_says_what_to_do(tiny_model):
    with start(tiny_model) as running:
        stream = running.generate(
            prompt="The banyan grows",
            sampling_params=PARAMS | {"max_new_tokens": 1500},
            stream=True,
        )
        next(iter(stream))
        children = psutil.Process().children()
        (mine, *_) = sorted(
            (c for c in children if runs(c, "banyan.server.processes")),
            key=lambda c: -c.create_time(),
        )
        mine.kill()
        reported = "was killed by SIGKILL. Nothing starts it again here: make a new Engine"
        with pytest.raises(BanyanError, match=reported):
            list(stream)
        with pytest.raises(BanyanError, match=reported):
            running.generate(prompt="The banyan grows", sampling_params=PARAMS)
