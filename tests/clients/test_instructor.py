"""instructor against a server on the demo model."""

import pytest

from tests.clients.conftest import Ask, Facts, Servers
from tests.clients.contract import check_city

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts(ask: Ask) -> Facts:
    return ask("instructor", "instructor_facts.py")


@pytest.mark.parametrize("fact", ["tools", "strict_tools", "schema"])
def test_a_mode_gives_an_object_at_the_first_attempt(facts: Facts, fact: str):
    check_city(facts[fact]["value"])
    prompt, completion, total = facts[fact]["usage"]
    assert prompt > 0 < completion and total == prompt + completion


@pytest.mark.parametrize("fact", ["nested_tools", "nested_schema"])
def test_a_class_inside_of_a_class_is_filled(facts: Facts, fact: str):
    check_city(facts[fact]["value"]["capital"])


@pytest.mark.parametrize("fact", ["partial_tools", "partial_schema"])
def test_a_partial_object_grows_to_the_whole(facts: Facts, fact: str):
    grown = facts[fact]
    names = [part["name"] or "" for part in grown]
    assert len(grown) > 2
    assert all(after.startswith(before) for before, after in zip(names, names[1:], strict=False))
    check_city(grown[-1])


def test_several_objects_come_as_they_are_ready(facts: Facts):
    for city in facts["several"]:
        check_city(city)


def test_an_asynchronous_client_gets_the_same_object(facts: Facts):
    check_city(facts["asynchronous"])


def test_refusals_say_their_cause_and_are_not_tried_again(facts: Facts, servers: Servers):
    causes = {
        "field": "temperature must be",
        "model": "demo:no-such-adapter",
        "key": "401",
        "cut": "max_tokens",
    }
    for name, text in causes.items():
        refused = facts["refusals"][name]
        assert refused["kinds"], f"{name}: {refused['text']}"
        assert text in refused["text"], f"{name}: {refused}"
    servers.check_idle()
