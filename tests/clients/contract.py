"""What the answers have to be, whichever client read them."""

import json

import jsonschema

from tests.clients.conftest import Servers
from tests.clients.scripts.facts import CITY, QUESTION, WEATHER

PARIS = "The capital of France is Paris."


def check_usage(usage: list[int], prompt: int, completion: int | None = None) -> None:
    """`usage` is [prompt, completion, total]."""
    assert usage[0] == prompt
    assert completion is None or usage[1] == completion
    assert usage[1] > 0
    assert usage[2] == usage[0] + usage[1]


def question_tokens(servers: Servers) -> int:
    return servers.count(messages=QUESTION)


def check_call(name: str, arguments: str | dict, id: str) -> None:
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "get_weather"
    assert id.startswith("call_")
    jsonschema.validate(parsed, WEATHER["function"]["parameters"])


def check_city(text: str | dict) -> None:
    jsonschema.validate(json.loads(text) if isinstance(text, str) else text, CITY)


def check_refusals(found: dict, **kinds: str) -> None:
    """Every refusal is the client's own exception, tells its status and names the cause."""
    said = {
        "field": (400, "temperature"),
        "model": (404, "demo:no-such-adapter"),
        "key": (401, ""),
        "length": (400, "context length"),
    }
    for name, kind in kinds.items():
        status, text = said[name]
        assert kind in found[name]["kinds"], f"{name}: {found[name]}"
        assert found[name]["status"] == status
        assert text in found[name]["text"]
