"""litellm against a server on the demo model."""

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
    return ask("litellm", "litellm_facts.py")


def test_a_chat_is_read_whole_and_its_usage_is_exact(facts: Facts, servers: Servers):
    chat = facts["chat"]
    assert (chat["content"], chat["finish"], chat["model"]) == (PARIS, "stop", "demo")
    check_usage(chat["usage"], question_tokens(servers), servers.count(prompt=PARIS) + 1)


def test_a_streamed_chat_is_the_same_with_one_end_and_one_id(facts: Facts):
    chat = facts["chat_stream"]
    assert chat["text"] == chat["content"] == PARIS
    assert (chat["ends"], chat["ids"]) == (["stop"], 1)
    assert chat["usage"] == facts["chat"]["usage"]


def test_a_completion_streams_the_same_text(facts: Facts, servers: Servers):
    whole = facts["completion"]
    assert facts["completion_stream"] == whole["text"]
    check_usage(whole["usage"], servers.count(prompt="The sun rises in the"), 8)


@pytest.mark.parametrize("fact", ["named_call", "required_call", "spoken_call"])
def test_a_tool_is_called(facts: Facts, fact: str):
    ((kind, id, name, arguments),) = facts[fact]["calls"]
    assert kind == "function" and facts[fact]["finish"] == "tool_calls"
    check_call(name, arguments, id)


@pytest.mark.parametrize("fact", ["named_call", "spoken_call"])
def test_a_streamed_call_is_put_together_to_the_same(facts: Facts, fact: str):
    whole, stream = facts[fact], facts[f"{fact}_stream"]
    assert [call[2:] for call in stream["calls"]] == [call[2:] for call in whole["calls"]]
    assert stream["ends"] == ["tool_calls"] and not stream["text"]


@pytest.mark.parametrize("fact", ["schema", "schema_stream"])
def test_an_answer_follows_its_schema(facts: Facts, fact: str):
    assert facts[fact]["finish"] == "stop"
    check_city(facts[fact]["content"])


def test_log_probabilities_are_given_for_every_token(facts: Facts):
    tokens = facts["logprobs"]
    assert len(tokens) == facts["chat"]["usage"][1]
    assert "".join(text for text, _, _ in tokens).startswith(PARIS)
    assert all(logprob <= 0 and top == 2 for _, logprob, top in tokens)


def test_two_choices_count_their_prompt_once(facts: Facts, servers: Servers):
    found = facts["choices"]
    assert found["indices"] == [0, 1] and found["texts"][0] != found["texts"][1]
    check_usage(found["usage"], question_tokens(servers))


def test_a_stop_string_ends_the_text(facts: Facts):
    assert facts["stop"]["content"] == PARIS.partition("Paris")[0]
    assert facts["stop"]["finish"] == "stop"


def test_refusals_are_the_clients_own_exceptions(facts: Facts):
    check_refusals(
        facts["refusals"],
        field="BadRequestError",
        model="NotFoundError",
        key="AuthenticationError",
        length="ContextWindowExceededError",
    )


def test_vectors_are_given(facts: Facts):
    assert facts["vectors"]["sizes"] == [384, 384]
    assert facts["vectors"]["indices"] == [0, 1]
    assert facts["vectors"]["prompt_tokens"] > 0


def test_requests_run_side_by_side(facts: Facts):
    assert facts["side_by_side"] == [PARIS] * 3


def test_a_client_that_leaves_gives_its_pages_back(facts: Facts, servers: Servers):
    assert facts["left_early"] == 3
    servers.check_idle()


def test_a_response_is_read(facts: Facts):
    found = facts["response"]
    assert (found["text"], found["status"]) == (PARIS, "completed")
    assert found["usage"] == facts["chat"]["usage"]
