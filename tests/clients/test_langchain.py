"""langchain-openai against a server on the demo model."""

import json

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


@pytest.fixture(scope="module")
def facts(ask: Ask) -> Facts:
    return ask("langchain-openai", "langchain_facts.py")


def test_a_chat_is_read_whole_and_its_usage_is_exact(facts: Facts, servers: Servers):
    chat = facts["chat"]
    assert (chat["text"], chat["finish"]) == (PARIS, "stop")
    check_usage(chat["usage"], question_tokens(servers), servers.count(prompt=PARIS) + 1)


def test_a_streamed_chat_adds_up_to_the_same(facts: Facts):
    assert facts["chat_stream"] == facts["chat"]


def test_a_completion_streams_the_same_text(facts: Facts):
    whole, stream = facts["completion"]
    assert whole == stream != ""


@pytest.mark.parametrize("fact", ["named_call", "required_call", "spoken_call", "response_call"])
def test_a_tool_is_called(facts: Facts, fact: str):
    ((name, arguments, id),) = facts[fact]["calls"]
    check_call(name, arguments, id)
    assert facts[fact]["broken"] == 0
    assert facts[fact]["finish"] == ("tool_calls" if fact != "response_call" else None)


@pytest.mark.parametrize("fact", ["named_call", "spoken_call"])
def test_a_streamed_call_adds_up_to_the_same(facts: Facts, fact: str):
    whole, stream = facts[fact], facts[f"{fact}_stream"]
    assert [call[:2] for call in stream["calls"]] == [call[:2] for call in whole["calls"]]
    assert (stream["finish"], stream["usage"]) == ("tool_calls", whole["usage"])


def test_a_call_and_its_result_go_back_into_the_prompt(facts: Facts):
    found = facts["call_and_result"]
    assert found["calls"] == [] and found["finish"] in ("stop", "length")


@pytest.mark.parametrize("fact", ["schema", "schema_by_call"])
def test_with_structured_output_gives_an_object_of_the_class(facts: Facts, fact: str):
    assert facts[fact]["error"] == "None"
    check_city(facts[fact]["city"])


@pytest.mark.parametrize("fact", ["schema_as_dict", "schema_stream"])
def test_a_schema_gives_its_object(facts: Facts, fact: str):
    check_city(facts[fact])


def test_json_mode_gives_an_object(facts: Facts):
    assert isinstance(json.loads(facts["json_mode"]["text"]), dict)


def test_log_probabilities_are_given_for_every_token(facts: Facts):
    tokens = facts["logprobs"]
    assert len(tokens) == facts["chat"]["usage"][1]
    assert all(logprob <= 0 and top == 2 for _, logprob, top in tokens)


def test_two_choices_differ(facts: Facts):
    first, second = facts["choices"]
    assert first != second


def test_a_stop_string_ends_the_text(facts: Facts):
    assert facts["stop"]["text"] == PARIS.partition("Paris")[0]
    assert facts["stop"]["finish"] == "stop"


def test_refusals_are_the_clients_own_exceptions(facts: Facts):
    check_refusals(
        facts["refusals"],
        field="BadRequestError",
        model="NotFoundError",
        key="AuthenticationError",
        length="BadRequestError",
    )


def test_vectors_are_given(facts: Facts):
    assert facts["vectors"] == [384, 384, 384]


def test_requests_run_side_by_side(facts: Facts):
    assert facts["side_by_side"] == [PARIS] * 3


def test_a_client_that_leaves_gives_its_pages_back(facts: Facts, servers: Servers):
    assert facts["left_early"] == 3
    servers.check_idle()


def test_a_response_is_read_whole_and_streamed(facts: Facts):
    found = facts["response"]
    assert found["text"] == found["streamed"] == PARIS
    assert found["usage"] == facts["chat"]["usage"]
