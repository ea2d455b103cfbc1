"""Experts that answers tell of, against those that the routers of transformers choose."""

import base64
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import banyan
from banyan.base.errors import ConfigError, RequestError
from banyan.formats.arrays import read_arrays
from tests.models.drafting import tiny_mtp
from tests.models.families import tiny
from tests.support.expert_requests import FIRST, GREEDY, PROMPTS
from tests.system.serving import Server, serving, stream_events
from tests.system.test_expert_record import VARIANT, paths_in, routed, server_record

EXACT = "--cpu-activations fp32 --chunked-prefill-size 16 --page-size 16 --threads 1"
TELL = {"return_routed_experts": True}
Model = tuple[Path, Callable[[list[int]], np.ndarray]]


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory) -> Model:
    """A checkpoint, and what its tokens choose: int32 [positions, layers, per token]."""
    path = tmp_path_factory.mktemp("routed")
    reference = tiny(VARIANT, path, vocab_size=512)
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, path)

    def chosen(tokens: list[int]) -> np.ndarray:
        config, of_layer = reference.config, routed(reference, tokens)
        shape = (len(tokens), config.num_hidden_layers, config.num_experts_per_tok)
        found = np.zeros(shape, np.int32)
        for layer, ids in of_layer.items():
            found[:, layer] = ids.reshape(len(tokens), -1).numpy()
        return found

    return path, chosen


@pytest.fixture(scope="module")
def server(model: Model, tmp_path_factory) -> Iterator[Server]:
    """Two joined replicas whose ranks each hold half of the experts."""
    folder = tmp_path_factory.mktemp("routed-log")
    flags = f"{EXACT} --tp 2 --ep 2 --dp 2 --enable-dp-attention --enable-return-routed-experts"
    flags += " --load-balance-method round_robin --expert-distribution-recorder-mode stat"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(folder))
        with serving(
            folder / "server.log", "--model-path", str(model[0]), *flags.split()
        ) as running:
            yield running


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[banyan.Engine]:
    with open_engine(model[0], max_total_tokens=320, max_running_requests=4) as running:
        yield running


def open_engine(path: Path, **more) -> banyan.Engine:
    usual = {"skip_tokenizer_init": True, "engine_mode": "inprocess", "threads": 1}
    usual |= {"cpu_activations": "fp32", "chunked_prefill_size": 16, "page_size": 16}
    usual |= {"enable_return_routed_experts": True, "check_ledger": True}
    return banyan.Engine(model_path=str(path), **usual, **more)


def experts_in(text: str, like: np.ndarray) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.int32).reshape(-1, *like.shape[1:])


def check(answer: dict, prompt: list[int], model: Model, start: int = 0) -> None:
    """Of every token from `start` on but the last, which nothing has read."""
    expected = model[1]((prompt + answer["output_ids"])[:-1])
    assert np.array_equal(
        experts_in(answer["meta_info"]["routed_experts"], expected), expected[start:]
    )


def test_what_an_answer_tells_is_what_the_routers_of_transformers_choose(server, model):
    answers = server.http.post(
        "/generate", json={"input_ids": PROMPTS, "sampling_params": GREEDY, **TELL}
    ).json()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        check(answer, prompt, model)
    plain = server.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert "routed_experts" not in plain["meta_info"]
    assert plain["output_ids"] == answers[0]["output_ids"]


def test_joined_replicas_record_the_choices_of_both(server, model):
    record = server_record(server)
    record("start")
    body = {"input_ids": PROMPTS, "sampling_params": GREEDY, **TELL}
    answers = server.http.post("/generate", json=body).json()
    record("stop")
    (path,) = paths_in(record("dump"))
    counts = read_arrays(path)["logical_count"]
    chosen = [model[1]((p + a["output_ids"])[:-1]) for p, a in zip(PROMPTS, answers, strict=True)]
    for layer in np.flatnonzero(counts.any(-1)):
        ids = np.concatenate([ids[:, layer].ravel() for ids in chosen])
        assert np.array_equal(counts[layer], np.bincount(ids, minlength=counts.shape[1]))
    assert counts.any()
    states = server.facts()["internal_states"]
    assert all(state["stats"]["finished"] for state in states)


def test_a_stream_tells_it_in_its_last_chunk(server, model):
    body = {"input_ids": PROMPTS[1], "sampling_params": GREEDY, "stream": True, **TELL}
    with server.http.stream("POST", "/generate", json=body) as response:
        chunks = list(stream_events(response))
    assert len(chunks) > 1
    assert all("routed_experts" not in chunk["meta_info"] for chunk in chunks[:-1])
    check(chunks[-1], PROMPTS[1], model)


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_routes_of_openai_tell_it_next_to_their_choices(is_chat, server, model):
    words = "one two three four five"
    asked: dict = (
        {"messages": [{"role": "user", "content": words}]} if is_chat else {"prompt": words}
    )
    body = asked | {"max_tokens": 6, "temperature": 0, "ignore_eos": True, **TELL}
    route = "/v1/chat/completions" if is_chat else "/v1/completions"
    answer = server.http.post(route, json=body).json()
    found = answer["sglext"]["routed_experts"]
    tokens = answer["usage"]["total_tokens"]
    assert experts_in(found, model[1]([1])).shape[0] == tokens - 1
    start = {"routed_experts_start_len": 3}
    later = server.http.post(route, json=body | start).json()["sglext"]["routed_experts"]
    assert np.array_equal(experts_in(later, model[1]([1])), experts_in(found, model[1]([1]))[3:])
    with server.http.stream("POST", route, json=body | {"stream": True}) as response:
        chunks = list(stream_events(response))
    assert [c["sglext"]["routed_experts"] for c in chunks if "sglext" in c] == [found]
    assert server.http.post(route, json=body | {"n": 2}).status_code == 400
    if not is_chat:
        ids = server.http.post("/tokenize", json={"prompt": words}).json()["tokens"]
        native = server.generate(
            input_ids=ids, sampling_params=GREEDY | {"max_new_tokens": 6}, **TELL
        )
        assert native["meta_info"]["routed_experts"] == found


def test_requests_that_ask_are_answered_next_to_drafts_of_others(tmp_path):
    tiny_mtp("deepseek v3", tmp_path)
    answers = []
    for drafts in ({}, {"speculative_algorithm": "NEXTN", "disable_adaptive_drafts": True}):
        with open_engine(tmp_path, **drafts) as engine:
            ask = {"return_routed_experts": True, "sampling_params": GREEDY}
            plain = engine.generate(input_ids=PROMPTS[1:], sampling_params=GREEDY)
            answers.append((engine.generate(input_ids=PROMPTS, **ask), plain))
    (asked, plain), (beside, drafted) = answers
    for one, other in zip(asked, beside, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert one["meta_info"]["routed_experts"] == other["meta_info"]["routed_experts"]
    assert [a["output_ids"] for a in plain] == [a["output_ids"] for a in drafted]
    assert all(a["meta_info"]["spec_verify_ct"] for a in drafted)


def test_a_cached_prefix_hides_nothing_and_is_used_up_to_the_start(engine, model):
    prompt, again = FIRST[0], FIRST[1]
    engine.generate(input_ids=[prompt], sampling_params=GREEDY)
    whole, later, end = (
        engine.generate(
            input_ids=again, sampling_params=GREEDY, routed_experts_start_len=start, **TELL
        )
        for start in (0, 32, len(again))
    )
    assert [a["meta_info"]["cached_tokens"] for a in (whole, later)] == [0, 32]
    check(whole, again, model)
    check(later, again, model, 32)
    check(end, again, model, len(again))


def test_retracted_requests_tell_every_position_once(engine, model):
    longer = GREEDY | {"max_new_tokens": 60}
    answers = engine.generate(input_ids=PROMPTS, sampling_params=longer, **TELL)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        check(answer, prompt, model)


def test_a_prompt_alone_tells_all_positions_but_its_last(engine, model):
    answer = engine.generate(input_ids=PROMPTS[0], sampling_params={"max_new_tokens": 0}, **TELL)
    check(answer, PROMPTS[0], model)


def test_bursts_leave_those_alone_that_ask(model):
    with open_engine(model[0], num_continuous_decode_steps=4) as engine:
        plain = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        asked = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, **TELL)
    for prompt, answer, other in zip(PROMPTS, asked, plain, strict=True):
        check(answer, prompt, model)
        assert answer["output_ids"] == other["output_ids"]


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (TELL | {"routed_experts_start_len": -1}, "at least 0"),
        (TELL | {"routed_experts_start_len": 21}, r"in \[0, 20\]"),
        (TELL | {"return_hidden_states": True}, "cannot be combined|not configured"),
        ({"return_routed_experts": 3}, "true or false"),
    ],
)
def test_what_cannot_be_reported_is_refused(body, match, engine):
    with pytest.raises(RequestError, match=match):
        engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, **body)


def test_an_answer_has_a_largest_size(server):
    longer = GREEDY | {"max_new_tokens": 70}
    body = {"input_ids": [PROMPTS[4]] * 4000, "sampling_params": longer, **TELL}
    refused = server.http.post("/generate", json=body)
    assert refused.status_code == 400
    assert "choices of experts" in refused.json()["error"]["message"]


def test_without_the_flag_a_request_is_refused(model):
    with (
        banyan.Engine(
            model_path=str(model[0]), skip_tokenizer_init=True, engine_mode="inprocess", threads=1
        ) as engine,
        pytest.raises(RequestError, match="--enable-return-routed-experts"),
    ):
        engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, **TELL)


@pytest.mark.parametrize(
    ("variant", "flags", "match"),
    [
        ("mistral", {}, "this model has no experts"),
        (
            "qwen3 moe",
            {"model_impl": "transformers"},
            "cannot be combined with --model-impl transformers",
        ),
        (
            VARIANT,
            {"disaggregation_mode": "prefill"},
            "cannot be combined with --disaggregation-mode prefill",
        ),
    ],
)
def test_what_it_does_not_go_with_is_named(variant, flags, match, tmp_path):
    tiny(variant, tmp_path)
    with pytest.raises(ConfigError, match=match):
        banyan.Engine(
            model_path=str(tmp_path),
            skip_tokenizer_init=True,
            enable_return_routed_experts=True,
            **flags,
        )
