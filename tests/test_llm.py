"""The offline API on a tiny random model: answers as /generate gives them, batches in order."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

import banyan
from banyan.base.errors import BanyanError, ConfigError, RequestError
from tests.system.checkpoint import write_tiny_model

PROMPTS = ["The quick brown", "A server keeps", "One two three"]
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llm") / "model")


@pytest.fixture(scope="module")
def engine(model):
    with banyan.Engine(str(model), engine_mode="inprocess", max_total_tokens=2048) as engine:
        yield engine


def test_one_prompt_gives_one_answer(engine):
    answer = engine.generate("The quick brown", GREEDY)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 6
    assert meta["prompt_tokens"] == len(engine.tokenizer.encode("The quick brown"))
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert answer["text"] == engine.tokenizer.decode(answer["output_ids"])


def test_the_counters_of_the_engine_can_be_watched(engine):
    before = engine.stats().output_tokens
    engine.generate("The quick brown", GREEDY)
    deadline = time.monotonic() + 60
    while engine.stats().output_tokens < before + 6:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_batch_is_answered_in_order_as_if_alone(engine):
    alone = [engine.generate(p, GREEDY)["output_ids"] for p in PROMPTS]
    together = engine.generate(PROMPTS, GREEDY)
    assert [a["output_ids"] for a in together] == alone


def test_n_multiplies_the_answers_of_each_prompt(engine):
    answers = engine.generate(PROMPTS[:2], [GREEDY | {"n": 2}, GREEDY | {"n": 3}])
    assert len(answers) == 5
    assert answers[0]["output_ids"] == answers[1]["output_ids"] != answers[2]["output_ids"]
    assert len({a["meta_info"]["id"] for a in answers}) == 5


def test_ids_give_what_their_text_gives(engine):
    ids = engine.tokenizer.encode(PROMPTS[0])
    by_ids = engine.generate(input_ids=ids, sampling_params=GREEDY)
    assert by_ids["output_ids"] == engine.generate(PROMPTS[0], GREEDY)["output_ids"]


def test_a_stream_is_cumulative_and_ends_with_the_whole_answer(engine):
    chunks = list(engine.generate(PROMPTS[0], GREEDY, stream=True))
    assert chunks[-1]["output_ids"] == engine.generate(PROMPTS[0], GREEDY)["output_ids"]
    for before, after in zip(chunks, chunks[1:], strict=False):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_leaving_a_stream_early_frees_its_request(engine):
    stream = engine.generate(PROMPTS[0], GREEDY | {"max_new_tokens": 500}, rid="left", stream=True)
    next(stream)
    stream.close()
    answer = None
    while answer is None:  # the id is taken until the engine has confirmed the abort
        try:
            answer = engine.generate(PROMPTS[0], GREEDY, rid="left")
        except RequestError as error:
            assert "Duplicate" in error.text
    assert answer["meta_info"]["id"] == "left"


def test_a_seed_repeats_its_answer(engine):
    params = {"max_new_tokens": 8, "sampling_seed": 3, "ignore_eos": True}
    first, second = (engine.generate(PROMPTS[0], params)["output_ids"] for _ in range(2))
    assert first == second


def test_two_starts_with_one_random_seed_sample_the_same(model):
    def sampled():
        options = {"max_new_tokens": 8, "ignore_eos": True}
        with banyan.Engine(
            str(model), engine_mode="inprocess", max_total_tokens=2048, random_seed=0
        ) as own:
            return [own.generate(PROMPTS[0], options)["output_ids"] for _ in range(2)]

    first = sampled()
    assert first == sampled()
    assert first[0] != first[1]


def test_log_probabilities_cover_prompt_and_output(engine):
    answer = engine.generate(
        PROMPTS[0],
        GREEDY,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert meta["input_token_logprobs"][0][0] is None
    assert [t[1] for t in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(t[0] <= 0 for t in meta["output_token_logprobs"])
    best = [position[0][1] for position in meta["output_top_logprobs"]]
    assert best == answer["output_ids"]


def test_no_new_tokens_scores_the_prompt_alone(engine):
    answer = engine.generate(
        PROMPTS[0], {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=1
    )
    meta = answer["meta_info"]
    assert answer["output_ids"] == [] and meta["completion_tokens"] == 0
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"] - 1


def test_callers_with_an_event_loop_can_run_many_at_once(engine):
    async def scenario():
        whole = await asyncio.gather(*(engine.async_generate(p, GREEDY) for p in PROMPTS))
        stream = await engine.async_generate(PROMPTS[0], GREEDY, stream=True)
        last = [chunk async for chunk in stream][-1]
        return whole, last

    whole, last = asyncio.run(scenario())
    assert [a["output_ids"] for a in whole] == [
        a["output_ids"] for a in engine.generate(PROMPTS, GREEDY)
    ]
    assert last["output_ids"] == whole[0]["output_ids"]


def test_a_wrong_request_is_refused_and_the_next_one_served(engine):
    with pytest.raises(RequestError, match="top_p must be"):
        engine.generate("x", {"top_p": 2})
    with pytest.raises(RequestError, match="Exactly one of text, input_ids and input_embeds"):
        engine.generate()
    with pytest.raises(RequestError, match="--is-embedding"):
        engine.encode("x")
    assert engine.generate("x", GREEDY)["output_ids"]


def test_the_cache_can_be_flushed_and_facts_be_read(engine):
    assert engine.flush_cache() is True
    facts = engine.get_server_info()
    assert facts["status"] == "ready" and facts["max_total_num_tokens"] >= 2048
    assert "api_key" not in facts and facts["page_size"] == 16


def test_a_process_of_its_own_answers_the_same(engine, model):
    with banyan.Engine(str(model), max_total_tokens=2048) as own:
        assert len(own.get_all_child_pids()) == 1
        answer = own.generate(PROMPTS[0], GREEDY)
    assert answer["output_ids"] == engine.generate(PROMPTS[0], GREEDY)["output_ids"]
    with pytest.raises(RequestError, match="shut down"):
        own.generate(PROMPTS[0], GREEDY)
    own.shutdown()


def test_arguments_and_models_that_cannot_work_are_named(tmp_path):
    with pytest.raises(ConfigError, match="engine_mode"):
        banyan.Engine("demo", engine_mode="warp")
    with pytest.raises(ConfigError, match="pagesiz"):
        banyan.Engine("demo", pagesiz=3)
    with pytest.raises(BanyanError):
        banyan.Engine(str(tmp_path / "nothing"))


def test_importing_the_package_is_light():
    code = "import sys, banyan; heavy = {'torch', 'msgspec', 'zmq'} & set(sys.modules); "
    code += "sys.exit(bool(heavy)); banyan.Engine"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="Motor"):
        banyan.Motor  # noqa: B018


@pytest.mark.parametrize("mode", ["normal", "inprocess"])
def test_a_program_that_never_shuts_its_engine_down_ends_quietly(model, mode):
    code = f"""
import banyan
engine = banyan.Engine({str(model)!r}, engine_mode={mode!r}, max_total_tokens=2048)
print(len(engine.generate("Hi", {GREEDY!r})["output_ids"]), *engine.get_all_child_pids())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    words = done.stdout.split()
    assert (done.returncode, done.stderr, words[:1]) == (0, "", ["6"])
    assert len(words) == (2 if mode == "normal" else 1)
    assert not any(Path("/proc", pid).exists() for pid in words[1:])


@pytest.fixture
def sleeper(tmp_path):
    """Serves a folder of its own, and may release memory."""
    path = write_tiny_model(tmp_path / "model")
    flags = {"engine_mode": "inprocess", "max_total_tokens": 1024, "enable_memory_saver": True}
    with banyan.Engine(str(path), **flags) as engine:
        yield engine, path


def test_memory_is_released_and_resumed(sleeper) -> None:
    engine, _ = sleeper
    first = engine.generate(PROMPTS[0], GREEDY)["output_ids"]
    engine.release_memory_occupation(["weights"])
    with pytest.raises(RequestError, match="released already"):
        engine.release_memory_occupation()
    engine.resume_memory_occupation()
    assert engine.generate(PROMPTS[0], GREEDY)["output_ids"] == first


def test_weights_do_not_come_back_from_other_files(sleeper) -> None:
    engine, path = sleeper
    first = engine.generate(PROMPTS[0], GREEDY)["output_ids"]
    engine.release_memory_occupation(["weights"])
    write_tiny_model(path, seed=1)
    with pytest.raises(RequestError, match="not those that the weights were read from"):
        engine.resume_memory_occupation()
    assert engine.update_weights_from_disk(str(path)) == (True, "The weights have been taken.")
    assert engine.generate(PROMPTS[0], GREEDY)["output_ids"] != first
    (path / "model.safetensors").unlink()
    with pytest.raises(RequestError, match="model.safetensors|safetensors"):
        engine.release_memory_occupation(["weights"])
    assert engine.generate(PROMPTS[0], GREEDY)["output_ids"] != first


def test_random_weights_come_back_as_they_were(model) -> None:
    flags = {"engine_mode": "inprocess", "max_total_tokens": 1024, "enable_memory_saver": True}
    with banyan.Engine(str(model), load_format="dummy", **flags) as engine:
        first = engine.generate(PROMPTS[0], GREEDY)["output_ids"]
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        assert engine.generate(PROMPTS[0], GREEDY)["output_ids"] == first
