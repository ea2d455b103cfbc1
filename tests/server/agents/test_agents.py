"""Common agents work unchanged: their requests are played over a socket, and every answer is read
as their clients read it."""

import json

import httpx
import pytest

from tests.server.agents.sequences import AGENTS, QUESTION, Body
from tests.server.fakes import Site
from tests.server.talk import TEMPLATE, says, service_with

CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": ["ls"]}}\n</tool_call>'
THOUGHT = "<think>\nI list it.\n</think>\n\n"
LAST = "There is a README.md."


def data(text: str) -> list[Body]:
    """The objects of a stream of server-sent events."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat_message(text: str) -> Body:
    """The message of a chat's stream, as clients add up its deltas."""
    found: Body = {"content": "", "tool_calls": []}
    for choice in (choice for event in data(text) for choice in event["choices"]):
        found["content"] += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls") or []:
            if "id" in delta:
                found["tool_calls"].append({**delta, "function": dict(delta["function"])})
            else:
                function = found["tool_calls"][delta["index"]]["function"]
                function["arguments"] += delta["function"]["arguments"]
    for call in found["tool_calls"]:
        del call["index"]
    return found


def anthropic_message(text: str) -> Body:
    """The message of a stream of the Messages API, as its events add up."""
    blocks: list[Body] = []
    for event in data(text):
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            for name, value in event["delta"].items():
                if name == "partial_json":
                    blocks[-1]["text of input"] = blocks[-1].get("text of input", "") + value
                elif name != "type":
                    blocks[-1][name] += value
    for block in blocks:
        if "text of input" in block:
            block["input"] = json.loads(block.pop("text of input"))
    return {"content": blocks}


def ollama_message(text: str) -> Body:
    found: Body = {"content": "", "tool_calls": []}
    for line in text.splitlines():
        message = json.loads(line)["message"]
        found["content"] += message.get("content") or ""
        found["tool_calls"] += message.get("tool_calls") or []
    return found


def read(path: str, answer: httpx.Response) -> Body:
    """What a client of this API takes from an answer."""
    is_stream = not answer.headers["content-type"].startswith("application/json")
    if path.startswith("/api/chat"):
        return ollama_message(answer.text)
    if not is_stream:
        body = answer.json()
        return body["choices"][0]["message"] if "choices" in body else body
    if path.startswith("/v1/responses"):
        (completed,) = (e for e in data(answer.text) if e["type"] == "response.completed")
        return completed["response"]
    if path.startswith("/v1/messages"):
        return anthropic_message(answer.text)
    return {} if path == "/v1/completions" else chat_message(answer.text)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_through_its_conversation(site: Site, http: httpx.Client, name: str) -> None:
    site.state.service = service_with(site, TEMPLATE, "hermes", "qwen3")
    agent, answer, has_called = AGENTS[name](), None, False
    while True:
        try:
            path, body = agent.send(answer) if answer is not None else next(agent)
        except StopIteration:
            break
        is_call = not has_called and "tools" in body and "count_tokens" not in path
        says(site, THOUGHT + (CALL if is_call else LAST), pieces=9)
        response = http.post(path, json=body) if body else http.get(path)
        assert response.status_code == 200, (path, response.text)
        answer = read(path, response)
        if is_call:
            has_called = True
            assert "ls" in json.dumps(answer), answer
    prompts = [
        site.tokenizer.decode(asked.prompt, skip_special_tokens=False)
        for asked in site.generator.asked
    ]
    assert any(QUESTION in prompt and "README.md" in prompt for prompt in prompts)
    assert all("get_weather" not in prompt for prompt in prompts)
