"""Hidden states through every route, against plain transformers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from banyan.base.errors import RequestError
from banyan.llm import Engine
from tests.system.serving import Server, serving, stream_events

EXACT = ("--cpu-activations", "fp32", "--chunked-prefill-size", "16", "--page-size", "8")
PROMPT = [5 + 3 * i % 250 for i in range(45)]
SHORT = PROMPT[:20]
SIX = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
CLOSE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def exact(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("hidden") / "server.log"
    model = ("--model-path", str(tiny_model), "--threads", "1", "--max-total-tokens", "4096")
    with serving(log, *model, *EXACT, "--enable-return-hidden-states") as running:
        yield running


@pytest.fixture(scope="module")
def reference(tiny_model: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def states_of(reference, tokens: list[int]) -> np.ndarray:
    """Last hidden states of a sequence, [positions, hidden]."""
    with torch.no_grad():
        found = reference(torch.tensor([tokens]), output_hidden_states=True)
    return found.hidden_states[-1][0].numpy()


def check_all(answer: dict, prompt: list[int], reference) -> None:
    """The prompt's states in one list, then one for each output token but the last."""
    states = answer["meta_info"]["hidden_states"]
    expected = states_of(reference, (prompt + answer["output_ids"])[:-1])
    assert len(states[0]) == len(prompt) and len(states) == len(answer["output_ids"])
    assert np.allclose(states[0], expected[: len(prompt)], **CLOSE)
    assert np.allclose(np.array(states[1:]), expected[len(prompt) :], **CLOSE)


def test_states_of_prompt_and_output_equal_those_of_transformers(exact, reference):
    answer = exact.generate(input_ids=PROMPT, sampling_params=SIX, return_hidden_states=True)
    check_all(answer, PROMPT, reference)


def test_a_cached_prefix_hides_no_states(exact, reference):
    exact.generate(input_ids=PROMPT, sampling_params=SIX)
    again = exact.generate(input_ids=PROMPT, sampling_params=SIX)
    assert again["meta_info"]["cached_tokens"] >= 40
    answer = exact.generate(input_ids=PROMPT, sampling_params=SIX, return_hidden_states=True)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert answer["output_ids"] == again["output_ids"]
    check_all(answer, PROMPT, reference)


def test_a_batch_has_the_states_that_each_prompt_asked_for(exact, reference):
    wanted = [True, False, "last", True]
    prompts = [PROMPT, SHORT, PROMPT, SHORT[:3]]
    answers = exact.generate(input_ids=prompts, sampling_params=SIX, return_hidden_states=wanted)
    check_all(answers[0], prompts[0], reference)
    check_all(answers[3], prompts[3], reference)
    assert "hidden_states" not in answers[1]["meta_info"]
    (last,) = answers[2]["meta_info"]["hidden_states"]
    expected = states_of(reference, (PROMPT + answers[2]["output_ids"])[:-1])[-1]
    assert np.allclose(last, expected, **CLOSE)


def test_the_last_state_may_follow_a_cached_prefix(exact, reference):
    exact.generate(input_ids=PROMPT, sampling_params=SIX)
    answer = exact.generate(input_ids=PROMPT, sampling_params=SIX, return_hidden_states="last")
    assert answer["meta_info"]["cached_tokens"] >= 40
    (last,) = answer["meta_info"]["hidden_states"]
    expected = states_of(reference, (PROMPT + answer["output_ids"])[:-1])[-1]
    assert np.allclose(last, expected, **CLOSE)


@pytest.mark.parametrize("wanted", [True, "last"])
def test_a_prompt_without_an_output_has_states(exact, reference, wanted):
    params = {"max_new_tokens": 0}
    answer = exact.generate(input_ids=PROMPT, sampling_params=params, return_hidden_states=wanted)
    states = answer["meta_info"]["hidden_states"]
    expected = states_of(reference, PROMPT)
    found = states[0] if wanted is True else states
    assert len(states) == 1
    assert np.allclose(found, expected if wanted is True else expected[-1:], **CLOSE)


def test_a_stop_text_cuts_the_states_with_the_output(exact, reference):
    whole = exact.generate(input_ids=PROMPT, sampling_params=SIX | {"max_new_tokens": 12})
    stop = whole["text"][len(whole["text"]) // 2 :][:2]
    params = SIX | {"max_new_tokens": 12, "stop": stop}
    answer = exact.generate(input_ids=PROMPT, sampling_params=params, return_hidden_states=True)
    assert 0 < len(answer["output_ids"]) < 12
    check_all(answer, PROMPT, reference)


def test_a_stream_has_the_states_in_its_last_chunk(exact, reference):
    body = {"input_ids": SHORT, "sampling_params": SIX, "return_hidden_states": True}
    with exact.http.stream("POST", "/generate", json=body | {"stream": True}) as response:
        chunks = list(stream_events(response))
    assert len(chunks) > 1
    assert all("hidden_states" not in chunk["meta_info"] for chunk in chunks[:-1])
    check_all(chunks[-1], SHORT, reference)


def test_a_retracted_request_reports_every_state_once(tiny_model, reference):
    flags = {"page_size": 8, "max_total_tokens": 320, "chunked_prefill_size": 16}
    flags |= {"cpu_activations": "fp32", "schedule_conservativeness": 0.0, "threads": 1}
    more = {"enable_return_hidden_states": True, "engine_mode": "inprocess"}
    prompts = [SHORT[i:] for i in range(12)]
    params = {"temperature": 0, "max_new_tokens": 48, "min_new_tokens": 48}
    with Engine(str(tiny_model), **flags, **more) as engine:
        answers = engine.generate(
            input_ids=prompts, sampling_params=params, return_hidden_states=True
        )
    assert sum(a["meta_info"]["num_retractions"] for a in answers) > 0
    for answer, prompt in zip(answers, prompts, strict=True):
        check_all(answer, prompt, reference)


def test_the_openai_routes_give_the_last_state(exact, reference):
    body = {"prompt": SHORT, "max_tokens": 6, "temperature": 0, "return_hidden_states": True}
    choice = exact.http.post("/v1/completions", json=body).json()["choices"][0]
    native = exact.generate(input_ids=SHORT, sampling_params=SIX | {"ignore_eos": False})
    expected = states_of(reference, (SHORT + native["output_ids"])[:-1])[-1]
    assert np.allclose(choice["hidden_states"], expected, **CLOSE)
    with exact.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        chunks = list(stream_events(response))
    assert chunks[-2]["choices"][0]["finish_reason"]
    assert chunks[-1]["choices"][0]["hidden_states"] == choice["hidden_states"]


def test_chat_gives_the_last_state_whole_and_streamed(exact):
    body = {
        "messages": [{"role": "user", "content": "One two three"}],
        "max_tokens": 5,
        "temperature": 0,
        "n": 2,
        "return_hidden_states": True,
    }
    answer = exact.http.post("/v1/chat/completions", json=body).json()
    states = [choice["hidden_states"] for choice in answer["choices"]]
    assert states[0] == states[1] and len(states[0]) == 64
    with exact.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as it:
        found = [c["choices"][0] for c in stream_events(it)]
    streamed = {
        c["index"]: c["delta"]["hidden_states"] for c in found if "hidden_states" in c["delta"]
    }
    assert streamed == {0: states[0], 1: states[1]}


def test_without_the_flag_a_request_for_hidden_states_is_refused(tiny_model):
    with Engine(str(tiny_model), engine_mode="inprocess", threads=1) as engine:
        with pytest.raises(RequestError, match="--enable-return-hidden-states"):
            engine.generate(input_ids=SHORT, sampling_params=SIX, return_hidden_states=True)
        plain = engine.generate(input_ids=SHORT, sampling_params=SIX, return_hidden_states=False)
    assert "hidden_states" not in plain["meta_info"]


@pytest.mark.parametrize("wrong", ["first", 3, {"a": 1}, [True, True]])
def test_only_true_false_and_last_are_legal(exact, wrong):
    body = {"input_ids": SHORT, "return_hidden_states": wrong}
    answer = exact.http.post("/generate", json=body)
    assert answer.status_code == 400
    assert "return_hidden_states" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_the_demo_model_agrees_with_transformers(demo_model):
    """The weights are dequantised by the library, which knows the file format too."""
    from transformers import AutoModelForCausalLM

    tokens = [504, 3575, 282, 4649, 314]
    with Engine(
        "demo",
        engine_mode="inprocess",
        enable_return_hidden_states=True,
        cpu_activations="fp32",
        max_total_tokens=1024,
    ) as engine:
        answer = engine.generate(
            input_ids=tokens, sampling_params=SIX | {"max_new_tokens": 3}, return_hidden_states=True
        )
    model = AutoModelForCausalLM.from_pretrained(
        demo_model.parent, gguf_file=demo_model.name, dtype=torch.float32
    )
    check_all(answer, tokens, model.eval())
