"""The npm client `openai` against a server on the demo model; its script checks every chunk."""

import pytest

from tests.clients.conftest import Ask, Facts, Servers
from tests.clients.contract import (
    PARIS,
    check_call,
    check_city,
    check_refusals,
    check_usage,
    question_tokens,
)

pytestmark = pytest.mark.slow
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


@pytest.fixture(scope="module")
def facts(ask: Ask) -> Facts:
    return ask("node", "npm_facts.mjs")


def without_ids(choices: list[dict]) -> list[dict]:
    """The choices without the ids of their calls, which are drawn anew each time."""
    return [
        {**choice, "calls": [{**call, "id": ""} for call in choice["calls"]]} for choice in choices
    ]


def test_models_are_listed_and_found(facts: Facts):
    assert facts["models"] == {"listed": [["demo", "model", True]], "found": "demo"}


@pytest.mark.parametrize(
    "fact",
    [
        *("chat", "logprobs", "choices", "stop", "length", "schema"),
        *("named_call", "required_call", "spoken_call"),
    ],
)
def test_a_stream_adds_up_to_the_whole_answer(facts: Facts, fact: str):
    whole, stream = facts[fact]["whole"], facts[fact]["stream"]
    assert without_ids(stream["choices"]) == without_ids(whole["choices"])
    assert stream["usage"] == whole["usage"]
    if fact != "choices":  # whole answers name the tokens of their first choice
        assert stream["tokens"] == whole["tokens"]


def test_usage_is_exact(facts: Facts, servers: Servers):
    prompt = question_tokens(servers)
    for fact, completion in (("chat", servers.count(prompt=PARIS) + 1), ("length", 3)):
        usage = facts[fact]["whole"]["usage"]
        check_usage([usage[name] for name in COUNTS], prompt, completion)
    tokens = facts["logprobs"]["whole"]["tokens"]
    assert len(tokens) == facts["logprobs"]["whole"]["usage"]["completion_tokens"]
    assert "".join(tokens).startswith(PARIS)


@pytest.mark.parametrize(
    ("fact", "text", "end"),
    [("chat", PARIS, "stop"), ("stop", "The capital of France is ", "stop")],
)
def test_a_chat_says_the_known_text(facts: Facts, fact: str, text: str, end: str):
    (choice,) = facts[fact]["whole"]["choices"]
    assert (choice["text"], choice["end"]) == (text, end)


def test_two_choices_differ(facts: Facts):
    first, second = facts["choices"]["whole"]["choices"]
    assert first["text"] != second["text"]


@pytest.mark.parametrize("fact", ["named_call", "required_call", "spoken_call"])
def test_a_tool_is_called(facts: Facts, fact: str):
    (choice,) = facts[fact]["stream"]["choices"]
    (call,) = choice["calls"]
    check_call(**call)
    assert (choice["text"], choice["end"]) == ("", "tool_calls")


def test_an_answer_follows_its_schema(facts: Facts):
    check_city(facts["schema"]["whole"]["choices"][0]["text"])


def test_a_completion_streams_the_same_text(facts: Facts, servers: Servers):
    found = facts["completion"]
    assert found["text"] == found["stream"] and found["ends"] == ["length"]
    usage = [found["usage"][name] for name in COUNTS]
    check_usage(usage, servers.count(prompt="The sun rises in the"), 8)


def test_the_streaming_helper_gives_the_same_text(facts: Facts):
    assert facts["helper_stream"] == {"text": PARIS, "final": PARIS, "end": "stop"}


def test_the_parsing_helpers_give_objects(facts: Facts):
    check_city(facts["helper_parse"])
    (arguments,) = facts["helper_tools"]
    check_city(arguments)


def test_the_tool_runner_calls_the_function(facts: Facts):
    (arguments,) = facts["helper_run_tools"]
    check_call("get_weather", arguments, "call_")


def test_refusals_are_the_clients_own_exceptions(facts: Facts):
    kinds = {"field": "BadRequestError", "model": "NotFoundError", "length": "BadRequestError"}
    check_refusals(facts["refusals"], key="AuthenticationError", **kinds)
    assert "BadRequestError" in facts["refusals"]["stream"]["kinds"]


def test_vectors_are_the_same_in_both_encodings(facts: Facts):
    assert facts["vectors"]["sizes"] == [384, 384]
    assert facts["vectors"]["apart"] < 1e-6


def test_requests_run_side_by_side(facts: Facts):
    assert facts["side_by_side"] == [PARIS] * 3


def test_a_client_that_leaves_gives_its_pages_back(facts: Facts, servers: Servers):
    assert facts["left_early"] >= 3
    servers.check_idle()


def test_a_response_streams_the_same_text(facts: Facts):
    found = facts["response"]
    stream = found["stream"]
    assert found["text"] == stream["text"] == PARIS
    assert found["status"] == stream["status"] == "completed"
    assert found["usage"] == stream["usage"]
    assert stream["types"][:2] == ["response.created", "response.in_progress"]
    assert stream["types"].count("response.completed") == 1
    assert stream["types"][-1] == "response.completed"


def test_a_response_calls_a_tool(facts: Facts):
    found = facts["response_call"]
    for call, *_ in (found["calls"], found["streamed"]):  # it may go on to speak
        assert call["type"] == "function_call"
        check_call(call["name"], call["arguments"], call["call_id"])
    assert found["arguments"] == found["streamed"][0]["arguments"]


def test_the_helper_of_responses_gives_the_same_text(facts: Facts):
    assert facts["response_helper"] == {"text": PARIS, "final": PARIS}
