"""The official openai client against a server on the demo model."""

import json
from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.system.serving import Server, settled

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "Name the capital of France."}]
PARIS = "The capital of France is Paris."


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


@pytest.fixture
def client(demo_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo_server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models_are_listed_and_found(client, model):
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_the_capital_of_france_is_paris(client, model):
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=32
    )
    choice = answer.choices[0]
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert choice.message.role == "assistant"
    usage = answer.usage
    assert 0 < usage.completion_tokens < 32
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_streamed_chat_is_the_same_text_with_usage_in_the_last_chunk(client, model):
    whole = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=32
    )
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=QUESTION,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    choices = [c.choices[0] for c in chunks if c.choices]
    assert choices[0].delta.role == "assistant"
    text = "".join(c.delta.content or "" for c in choices)
    assert text == whole.choices[0].message.content
    assert [c.finish_reason for c in choices if c.finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({c.id for c in chunks}) == 1


def test_a_completion_streams_the_same_text(client, model):
    arguments = {"model": model, "prompt": "The sun rises in the", "temperature": 0}
    whole = client.completions.create(**arguments, max_tokens=12)
    parts = client.completions.create(**arguments, max_tokens=12, stream=True)
    text = "".join(c.choices[0].text for c in parts if c.choices)
    assert text == whole.choices[0].text
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"


def test_a_batch_of_prompts_is_answered_in_order(client, model):
    prompts = ["One, two, three,", "The capital of Italy is", "Roses are red, violets are"]
    batch = client.completions.create(model=model, prompt=prompts, temperature=0, max_tokens=8)
    alone = [
        client.completions.create(model=model, prompt=p, temperature=0, max_tokens=8)
        .choices[0]
        .text
        for p in prompts
    ]
    assert [c.index for c in batch.choices] == [0, 1, 2]
    assert [c.text for c in batch.choices] == alone


def test_two_choices_of_one_seed_differ_and_repeat(client, model):
    def texts() -> list[str]:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Tell me a story."}],
            n=2,
            seed=7,
            temperature=1.0,
            max_tokens=16,
        )
        assert [c.index for c in answer.choices] == [0, 1]
        return [c.message.content for c in answer.choices]

    first = texts()
    assert first[0] != first[1]
    assert texts() == first


def test_a_streamed_chat_with_two_choices_ends_each_once(client, model):
    chunks = client.chat.completions.create(
        model=model, messages=QUESTION, n=2, seed=3, max_tokens=8, stream=True
    )
    ends = [(c.index, c.finish_reason) for x in chunks for c in x.choices if c.finish_reason]
    assert sorted(i for i, _ in ends) == [0, 1]


def test_chat_logprobs_name_the_chosen_token_and_its_rivals(client, model):
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    assert "".join(t.token for t in content) == answer.choices[0].message.content
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert token.logprob == token.top_logprobs[0].logprob <= 0
        assert bytes(token.bytes).decode(errors="replace") == token.token


def test_completion_logprobs_are_as_long_as_the_answer(client, model):
    answer = client.completions.create(
        model=model, prompt="Water boils at", temperature=0, max_tokens=5, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 5
    assert all(len(top) >= 2 for top in logprobs.top_logprobs)


def test_echo_with_logprobs_scores_the_prompt(client, model):
    answer = client.completions.create(
        model=model, prompt="Water boils at", temperature=0, max_tokens=1, logprobs=1, echo=True
    )
    choice = answer.choices[0]
    assert choice.text.startswith("Water boils at")
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == answer.usage.total_tokens


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client, model, is_stream):
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, stop=["Paris"], stream=is_stream
    )
    if is_stream:
        choices = [c.choices[0] for c in answer if c.choices]
        text = "".join(c.delta.content or "" for c in choices)
        reason = choices[-1].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert "Paris" not in text and text.startswith("The capital")
    assert reason == "stop"


def test_a_refused_request_is_a_client_error_that_names_the_field(client, model):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=model, messages=QUESTION, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="(?i)messages"):
        client.chat.completions.create(model=model, messages=[])


def test_usage_is_what_the_server_counts_without_running_it(client, model, demo_server):
    def count(**body: object) -> int:
        return demo_server.http.post("/v1/tokenize", json=body).json()["count"]

    usage = client.chat.completions.create(model=model, messages=QUESTION, temperature=0).usage
    assert usage.prompt_tokens == count(messages=QUESTION)
    assert usage.completion_tokens == count(prompt=PARIS) + 1  # and the token that ends it


def test_the_streaming_helper_gathers_the_answer(client, model):
    with client.chat.completions.stream(model=model, messages=QUESTION, temperature=0) as stream:
        said = [event.delta for event in stream if event.type == "content.delta"]
    final = stream.get_final_completion()
    assert "".join(said) == final.choices[0].message.content == PARIS
    assert final.choices[0].finish_reason == "stop"


def test_parse_gives_an_object_of_the_class(client, model):
    answer = client.chat.completions.parse(
        model=model, messages=QUESTION, temperature=0, max_tokens=80, response_format=Weather
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_forced_call_is_parsed_into_the_class(client, model, is_stream):
    tool = openai.pydantic_function_tool(Weather)
    fields = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 80}
    fields |= {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    if is_stream:
        with client.chat.completions.stream(**fields) as stream:
            kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
    else:
        answer = client.chat.completions.parse(**fields)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert json.loads(call.function.arguments) == call.function.parsed_arguments.model_dump()
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_client_that_leaves_gives_its_pages_back(client, model, demo_server):
    before = settled(demo_server.stats, 1)["finished"]
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=6000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with stream:
        seen = [next(stream) for _ in range(3)]
    assert len(seen) == 3
    stats = settled(demo_server.stats, before + 1)
    assert stats["output_tokens"] < 6000
    assert stats["free_pages"] + stats["cached_pages"] == stats["total_pages"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_cannot_be_is_the_clients_own_exception(client, model, is_stream):
    asked = {"messages": QUESTION, "stream": is_stream}
    with pytest.raises(openai.NotFoundError, match="no-such-adapter"):
        client.chat.completions.create(model=f"{model}:no-such-adapter", **asked)
    asked["messages"] = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.chat.completions.create(model=model, **asked)
