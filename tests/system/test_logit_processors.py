"""Logit processors by name: a package with an entry point is installed beside the server."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan.base.errors import RequestError
from banyan.llm import Engine
from tests.system.serving import Server, serving, stream_events

PACKAGE = '''
"""Logit processors of a package that somebody has installed."""

import torch


def only(logits, context):
    """Nothing but one token."""
    kept = torch.full_like(logits, float("-inf"))
    token = context.params["token"]
    kept[token] = logits[token]
    return kept


def count(logits, context):
    """The successor of the last token; the first one tells how long the prompt is."""
    last = context.prompt_len if len(context.tokens) == context.prompt_len else context.tokens[-1]
    logits[int(last) + 1] = 1e6
    return logits


def breaks(logits, context):
    if len(context.tokens) - context.prompt_len == 2:
        raise RuntimeError("two are enough")
    return logits


def short(logits, context):
    return logits[:-1]


def nan(logits, context):
    return logits * float("nan")
'''
NAMES = ("only", "count", "breaks", "short", "nan")
PROMPT = [5, 6, 7, 8, 9]
SIX = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def processing(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that finds an installed package with five processors."""
    site = tmp_path_factory.mktemp("site")
    (site / "oak_processors.py").write_text(PACKAGE)
    about = site / "oak_processors-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: oak-processors\nVersion: 1.0\n")
    lines = [f"{name} = oak_processors:{name}" for name in NAMES]
    gone = "gone = no_such_module:gone"
    (about / "entry_points.txt").write_text("\n".join(["[banyan.logit_processors]", *lines, gone]))
    model = ("--model-path", str(tiny_model), "--threads", "1", "--max-total-tokens", "4096")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        log = tmp_path_factory.mktemp("log") / "server.log"
        with serving(log, *model, "--enable-custom-logit-processor") as running:
            yield running


def ask(server: Server, processor: str | None, **params: object) -> dict:
    return server.generate(
        input_ids=PROMPT, sampling_params=SIX | params, custom_logit_processor=processor
    )


def test_a_processor_decides_with_the_parameters_of_its_request(processing):
    answer = ask(processing, "only", custom_params={"token": 42})
    assert answer["output_ids"] == [42] * 6
    sampled = ask(processing, "only", custom_params={"token": 7}, temperature=1.0)
    assert sampled["output_ids"] == [7] * 6


def test_a_processor_sees_the_tokens_so_far(processing):
    assert ask(processing, "count")["output_ids"] == [6, 7, 8, 9, 10, 11]


def test_others_in_the_batch_are_as_they_are_alone(processing):
    alone = [ask(processing, None)["output_ids"], ask(processing, "count")["output_ids"]]
    answers = processing.generate(
        input_ids=[PROMPT] * 4,
        sampling_params=[SIX, SIX, SIX | {"custom_params": {"token": 9}}, SIX],
        custom_logit_processor=[None, "count", "only", None],
    )
    outputs = [a["output_ids"] for a in answers]
    assert outputs == [alone[0], alone[1], [9] * 6, alone[0]]


def test_bans_and_constraints_hold_after_a_processor(processing):
    banned = ask(processing, "count", logit_bias={"8": -1e6})
    assert banned["output_ids"][:2] == [6, 7] and banned["output_ids"][2] != 8
    shaped = ask(processing, "count", regex="[0-9]+", ignore_eos=False)
    assert shaped["text"].isdigit()


def test_log_probabilities_are_those_after_the_processor(processing):
    body = {"input_ids": PROMPT, "sampling_params": SIX | {"max_new_tokens": 1}}
    body |= {"return_logprob": True, "token_ids_logprob": [6]}
    plain = processing.generate(**body)["meta_info"]
    changed = processing.generate(**body, custom_logit_processor="count")["meta_info"]
    (before, *_), (after, *_) = (m["output_token_ids_logprobs"][0][0] for m in (plain, changed))
    assert before < after == changed["output_token_logprobs"][0][0] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("breaks", "RuntimeError: two are enough"),
        ("short", "logits of shape"),
        ("nan", "NaN"),
        ("gone", "no_such_module"),
    ],
)
def test_a_processor_that_fails_ends_its_own_request(processing, name, words):
    expected = ask(processing, None, max_new_tokens=40)["output_ids"]
    stream = {"input_ids": PROMPT, "sampling_params": SIX | {"max_new_tokens": 40}, "stream": True}
    with processing.http.stream("POST", "/generate", json=stream) as response:
        chunks = stream_events(response)
        next(chunks)
        body = {"input_ids": PROMPT, "sampling_params": SIX, "custom_logit_processor": name}
        answer = processing.http.post("/generate", json=body)
        assert answer.status_code == 500
        message = answer.json()["error"]["message"]
        assert name in message and words in message
        *_, last = chunks
    assert last["output_ids"] == expected


@pytest.mark.parametrize("code", ['{"callable": "80049528000000"}', "gASVKAAAAA==", "os:system"])
def test_code_in_a_request_is_refused_with_what_to_do(processing, code):
    chat = {"messages": [{"role": "user", "content": "hello"}], "custom_logit_processor": code}
    native = {"input_ids": PROMPT, "custom_logit_processor": code}
    for path, body in (("/generate", native), ("/v1/chat/completions", chat)):
        answer = processing.http.post(path, json=body)
        assert answer.status_code == 400
        message = (
            answer.json()["error"]["message"] if path == "/generate" else answer.json()["message"]
        )
        assert "only, count, breaks, short, nan, gone" in message
        assert "banyan.logit_processors" in message


def test_the_openai_routes_take_processors_too(processing):
    more = {"max_tokens": 4, "custom_logit_processor": "only", "custom_params": {"token": 42}}
    words = processing.http.post("/detokenize", json={"tokens": [42] * 4}).json()["text"]
    completion = {"prompt": PROMPT, **more}
    answer = processing.http.post("/v1/completions", json=completion).json()
    assert answer["choices"][0]["text"] == words
    chat = {"messages": [{"role": "user", "content": "hello"}], **more}
    answer = processing.http.post("/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["message"]["content"] == words


def test_without_the_flag_a_request_for_a_processor_is_refused(tiny_model):
    asked = {"sampling_params": SIX, "custom_logit_processor": "only"}
    with (
        Engine(str(tiny_model), engine_mode="inprocess", threads=1) as engine,
        pytest.raises(RequestError, match="--enable-custom-logit-processor"),
    ):
        engine.generate(input_ids=PROMPT, **asked)
