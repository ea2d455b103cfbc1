"""Chat requests against a scripted model that thinks and calls tools, with every body checked
strictly against the official client's types."""

import json
from dataclasses import dataclass, field, replace

import httpx
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from banyan.parsers.choice import choose_parsers
from banyan.requests.generation import Finish
from banyan.server.state import Service
from tests.server.fakes import Site, chat_of, steps

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{% for t in tools or [] %}<tools>{{ t | tojson }}</tools>{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)


def tool(name: str, **extra: object) -> dict[str, object]:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, **extra}}


TOOLS = [tool("get_weather"), tool("search")]


def service_with(
    site: Site, template: str = TEMPLATE, tools: str = "", reasoning: str = ""
) -> Service:
    """The site's service as for a model with this chat template."""
    chat = chat_of(site.tokenizer, template)
    parsers = choose_parsers(tools, reasoning, template, chat.template.takes_tools)
    return replace(site.service, chat=chat, parsers=parsers)


def says(site: Site, text: str, finish: Finish | None = None, pieces: int = 3) -> None:
    """Let the model answer `text` in pieces."""
    cuts = [len(text) * i // pieces for i in range(pieces + 1)]
    parts = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    site.generator.script = lambda _: steps(*parts, finish=finish)


@dataclass
class Heard:
    """One choice as a client puts it together."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, object] | None = None

    @property
    def said(self) -> tuple[object, ...]:
        """All but ids and usage."""
        return self.content or "", self.reasoning or "", self.calls, self.finish


def ask(http: httpx.Client, stream: bool, **fields: object) -> Heard:
    """One answer of one choice; the stream is put together as clients do."""
    body = {"messages": USER, **fields}
    return _streamed(http, body) if stream else _whole(http, body)


def _whole(http: httpx.Client, body: dict[str, object]) -> Heard:
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    ChatCompletion.model_validate_json(answer.content, strict=True)
    choice = answer.json()["choices"][0]
    message = choice["message"]
    calls = message["tool_calls"] or []
    assert all(call["type"] == "function" for call in calls)
    return Heard(
        message["content"],
        message["reasoning_content"],
        [(c["function"]["name"], c["function"]["arguments"]) for c in calls],
        [c["id"] for c in calls],
        choice["finish_reason"],
        answer.json()["usage"],
    )


def _streamed(http: httpx.Client, body: dict[str, object]) -> Heard:
    options = {"include_usage": True}
    answer = http.post(PATH, json={**body, "stream": True, "stream_options": options})
    assert answer.status_code == 200, answer.text
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    heard = Heard()
    for line in lines[:-2]:
        ChatCompletionChunk.model_validate_json(line.removeprefix("data: "), strict=True)
        chunk = json.loads(line.removeprefix("data: "))
        if not chunk["choices"]:
            heard.usage = chunk["usage"]
            continue
        (choice,) = chunk["choices"]
        assert heard.finish is None, "nothing follows the finish_reason"
        _take(heard, choice["delta"])
        heard.finish = choice["finish_reason"]
    return heard


def _take(heard: Heard, delta: dict[str, object]) -> None:
    heard.content = (heard.content or "") + (delta["content"] or "")
    heard.reasoning = (heard.reasoning or "") + (delta["reasoning_content"] or "")
    for call in delta.get("tool_calls") or []:
        function = call["function"]
        if "name" in function:
            assert call["index"] == len(heard.calls) and call["type"] == "function"
            heard.calls.append((function["name"], function["arguments"]))
            heard.ids.append(call["id"])
        else:
            name, text = heard.calls[call["index"]]
            heard.calls[call["index"]] = (name, text + function["arguments"])
