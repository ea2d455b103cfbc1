"""The native form: every field is honoured, refused, or named; streams add up to whole answers."""

import asyncio
from dataclasses import replace

import pytest

from banyan.base.clock import VirtualClock
from banyan.base.errors import RequestError
from banyan.engine_client.text_generator import TextGenerator
from banyan.messages.requests import NO_SCORES
from banyan.requests.generate_request import parse_native
from banyan.requests.generate_response import NativeService, NativeSettings
from banyan.requests.request_spec import namespace_of
from banyan.requests.sampling_params import Limits
from tests.support.clients import asynchronous
from tests.support.fake_engine import EOS, VOCAB, ids_of, letters, logprob_of, serving, until
from tests.support.flags import config_of

TOKENIZER = letters()
LIMITS = Limits(context_length=200, vocab_size=VOCAB, eos_ids=(EOS,), max_sequences=12)


def parse(**body):
    return parse_native(body, tokenizer=TOKENIZER, limits=LIMITS)


def refused(**body):
    with pytest.raises(RequestError) as caught:
        parse(**body)
    assert caught.value.status == 400
    return caught.value


def test_texts_of_a_request_are_tokenised_in_one_call(monkeypatch):
    calls = []
    plain = TOKENIZER.encoder

    class Counting:
        """Counts the texts of each call."""

        def ids(self, texts, kind):
            calls.append(len(texts))
            return plain.ids(texts, kind)

    monkeypatch.setattr(TOKENIZER, "encoder", Counting())
    texts = ["abc", "de", "f"]
    prompts = []
    for flags in ((), ("--enable-tokenizer-batch-encode",)):
        limits = replace(LIMITS, batch_encode=config_of(*flags).server.batch_encode)
        found = parse_native({"text": texts}, tokenizer=TOKENIZER, limits=limits)
        prompts.append([s.request.prompt for s in found.sequences])
    assert prompts[0] == prompts[1]
    assert calls == [1, 1, 1, 3]


def echo(message):
    """Answers a prompt with its own tokens in capitals."""
    text = bytes(i - 1 for i in memoryview(message.tokens).cast("i")).decode().upper()
    return [*ids_of(text), EOS]


def service(client, **options):
    return NativeService(
        TextGenerator(client, TOKENIZER, LIMITS),
        TOKENIZER,
        LIMITS,
        NativeSettings(**options),
        clock=VirtualClock(5.0),
    )


async def answer_to(body, seed=0, **options):
    async with serving(echo, seed=seed) as (client, _):
        native = service(client, **options)
        return await native.answer(await native.read(body))


async def stream_of(body, seed=0, **options):
    async with serving(echo, seed=seed) as (client, _):
        native = service(client, **options)
        return [chunk async for chunk in native.stream(await native.read(body))]


@asynchronous
async def test_a_single_answer_has_text_ids_and_facts():
    answer = await answer_to({"text": "abc", "rid": "me"}, weight_version=lambda: "v7")
    assert answer == {
        "text": "ABC",
        "output_ids": [*ids_of("ABC"), EOS],
        "meta_info": {
            "id": "me",
            "finish_reason": {"type": "stop", "matched": EOS},
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "cached_tokens": 2,
            "num_retractions": 0,
            "weight_version": "v7",
            "e2e_latency": 0.0,
        },
    }


@asynchronous
async def test_scores_are_triples_by_position():
    body = {
        "text": "ab",
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        "token_ids_logprob": [5],
        "return_text_in_logprobs": True,
        "sampling_params": {"max_new_tokens": 1},
    }
    meta = (await answer_to(body))["meta_info"]
    assert meta["input_token_logprobs"] == [
        [None, ids_of("a")[0], "a"],
        [logprob_of(1), ids_of("b")[0], "b"],
    ]
    assert meta["output_token_logprobs"] == [[logprob_of(2), ids_of("A")[0], "A"]]
    assert meta["input_top_logprobs"][0] is None and meta["output_token_logprobs_length"] == 1
    assert meta["output_top_logprobs"] == [[[0.0, 0, "<eos>"]]]
    assert meta["output_token_ids_logprobs"] == [[[-5.0, 5, TOKENIZER.decode([5])]]]


@asynchronous
async def test_a_stream_is_cumulative_and_an_incremental_one_adds_up():
    body = {"text": "hello there", "stream": True}
    chunks = await stream_of(body)
    assert chunks[-1] == await answer_to(body | {"rid": chunks[-1]["meta_info"]["id"]})
    assert all(b["text"].startswith(a["text"]) for a, b in zip(chunks, chunks[1:], strict=False))
    parts = await stream_of(body, incremental=True)
    assert "".join(p["text"] for p in parts) == "HELLO THERE"
    assert sum((p["output_ids"] for p in parts), []) == chunks[-1]["output_ids"]
    assert parts[-1]["meta_info"]["completion_tokens"] == 12


@asynchronous
async def test_a_batch_stream_tells_sequences_apart_by_index():
    body = {"text": ["one", "two"], "sampling_params": {"n": 2}, "stream": True}
    chunks = await stream_of(body, seed=4)
    last = {c["index"]: c["text"] for c in chunks if c["meta_info"]["finish_reason"]}
    assert last == {0: "ONE", 1: "ONE", 2: "TWO", 3: "TWO"}


@asynchronous
async def test_a_failure_becomes_an_error_with_its_status_and_ends_the_others():
    async with serving(echo) as (client, engine):
        native = service(client)
        request = await native.read({"text": ["one", "two"], "stream": True})
        engine.failure = (503, "The request queue is full.")
        with pytest.raises(RequestError, match="queue is full") as caught:
            await native.answer(request)
        assert caught.value.status == 503
        engine.failure, engine.hold = None, True
        chunks = native.stream(await native.read({"text": ["one", "two"]}))
        waiting = asyncio.ensure_future(anext(chunks))
        await until(lambda: len(engine.live) == 2)
        client.engine_lost("killed")
        with pytest.raises(RequestError, match="killed"):
            await waiting
        assert len(client.streams) == 0


@asynchronous
async def test_leaving_a_batch_stream_aborts_all_its_sequences():
    async with serving(echo) as (client, engine):
        native = service(client)
        body = {"text": ["long prompt " * 5] * 3, "sampling_params": {"max_new_tokens": 60}}
        chunks = native.stream(await native.read(body))
        await anext(chunks)
        await chunks.aclose()
        await until(lambda: len(client.streams) == 0 and not engine.live)


def test_prompts_become_sequences_in_answer_order():
    request = parse(text=["a", "b"], sampling_params=[{"n": 1}, {"n": 2}])
    assert [s.request.prompt for s in request.sequences] == [ids_of(t) for t in "abb"]
    assert len(request.sequences) == 3 and request.is_list
    assert not parse(text="a").is_list and parse(text=["a"]).is_list
    assert parse(text="a", sampling_params={"n": 2}).is_list
    assert parse(input_ids=[[4, 5], [6]]).sequences[1].request.prompt == [6]


def ids(request):
    return [s.request.id for s in request.sequences]


def test_request_ids_are_the_callers_or_fresh():
    assert ids(parse(text="a", rid="x")) == ["x"]
    assert ids(parse(text=["a", "b"], rid="x")) == ["x_0", "x_1"]
    assert ids(parse(text=["a", "b"], rid=["x", "y"])) == ["x", "y"]
    assert ids(parse(text="a", rid="x", sampling_params={"n": 2})) == ["x_0", "x_1"]
    two = parse(text=["a", "b"], rid=["x", "y"], sampling_params={"n": 2})
    assert ids(two) == ["x_0", "x_1", "y_0", "y_1"]
    assert len(set(ids(parse(text=["a", "b"])))) == 2


def messages(**body):
    return [s.request.message for s in parse(**body).sequences]


def test_score_options_default_to_the_output_alone():
    scores = [
        (m.score_from, m.score_top, m.score_ids)
        for m in messages(
            text=["abc", "d"],
            return_logprob=[True, False],
            top_logprobs_num=[2, 0],
            token_ids_logprob=[[7], None],
        )
    ]
    assert scores == [(3, 2, (7,)), (NO_SCORES, 0, ())]
    shared = messages(text=["abc", "d"], return_logprob=True, token_ids_logprob=[7, 8])
    assert [m.score_ids for m in shared] == [(7, 8)] * 2


def test_namespaces_differ_by_credential_salt_and_key_and_are_empty_without():
    def of(**body):
        return parse(text="a", **body).sequences[0].request.message.namespace

    assert of() == b"" and of(cache_salt=None) == b""
    found = [of(cache_salt="s"), of(extra_key="s"), of(cache_salt="t")]
    found += [namespace_of(b"tenant", "s", None), namespace_of(b"tenant", None, None)]
    assert len(set(found)) == 5 and b"" not in found
    assert of(cache_salt="s") == namespace_of(b"", "s", None)


def test_fields_without_effect_are_named_in_the_answer():
    request = parse(text="a", routing_key="k", log_metrics=True, image_data=None, surprise=1)
    assert list(request.sequences[0].not_honoured) == ["routing_key", "surprise"]
    assert parse(text="a", image_data=[], lora_path=[None]).sequences[0].not_honoured == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("video_data", "cat.mp4"),
        ("session_params", {"id": "s"}),
    ],
)
def test_fields_that_would_change_the_answer_are_refused_by_name(field, value):
    assert refused(text="a", **{field: value}).text == f"{field} is not available in this build"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", ""]}, "text"),
        ({"text": ["a", 5]}, "text"),
        ({"text": {"a": 1}}, "text"),
        ({"text": ["a"] * 13}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [VOCAB]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids"),
        ({"input_ids": [None]}, "input_ids"),
        ({"input_ids": [1.0]}, "input_ids"),
        ({"input_ids": "12"}, "input_ids"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "sampling_params": "n"}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a"] * 4, "sampling_params": {"n": 4}}, "n"),
        ({"text": "a", "return_logprob": 1}, "return_logprob"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 257}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 2**70}, "top_logprobs_num"),
        ({"text": "a", "token_ids_logprob": [[1]]}, "token_ids_logprob"),
        ({"text": "a", "token_ids_logprob": ["1"]}, "token_ids_logprob"),
        ({"text": "a", "token_ids_logprob": [1] * 2000}, "token_ids_logprob"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "priority": 1.5}, "priority"),
        ({"text": "a", "priority": 2**40}, "priority"),
        ({"text": "a", "rid": "x" * 129}, "rid"),
        ({"text": "a", "rid": "a\nb"}, "rid"),
        ({"text": "a", "rid": 5}, "rid"),
        ({"text": "a", "rid": ""}, "rid"),
        ({"text": "a", "rid": ["x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "cache_salt": ""}, "cache_salt"),
        ({"text": "a", "cache_salt": "s" * 10_000}, "cache_salt"),
        ({"text": "a", "cache_salt": "a\0b"}, "cache_salt"),
        ({"text": "a", "cache_salt": "a@b"}, "cache_salt"),
        ({"text": "a", "extra_key": "🌳"}, "extra_key"),
    ],
)
def test_wrong_bodies_are_refused_with_the_field_at_fault(body, param):
    assert refused(**body).param == param


def test_without_a_tokenizer_text_is_refused_and_ids_are_served():
    with pytest.raises(RequestError, match="Send input_ids"):
        parse_native({"text": "a"}, tokenizer=None, limits=LIMITS)
    request = parse_native({"input_ids": [5]}, tokenizer=None, limits=LIMITS)
    assert request.sequences[0].request.prompt == [5]


@asynchronous
async def test_an_id_in_use_is_refused():
    async with serving(echo) as (client, engine):
        engine.hold = True
        native = service(client)
        first = asyncio.ensure_future(native.answer(await native.read({"text": "a", "rid": "x"})))
        await until(lambda: engine.live)
        with pytest.raises(RequestError, match="Duplicate request ID detected: x"):
            await native.answer(await native.read({"text": "b", "rid": "x"}))
        client.abort(next(iter(engine.live)))
        assert (await first)["meta_info"]["finish_reason"]["type"] == "abort"


@asynchronous
async def test_a_stream_reports_the_cached_prompt_from_its_first_chunk_on():
    chunks = await stream_of({"text": "hello world"})
    assert len(chunks) > 1
    assert [c["meta_info"]["cached_tokens"] for c in chunks] == [2] * len(chunks)
