"""The Messages API, spoken by the official client: every body and every event is checked strictly
against the client's types."""

import json

import anthropic
import httpx
import pytest
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from banyan.config.schema import ServerConfig
from banyan.messages.requests import Constraint
from banyan.requests.generation import Finish
from tests.server.fakes import Site, refusal, steps
from tests.server.talk import says, service_with

EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
PATH = "/v1/messages"
USER = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"name": "get_weather", "description": "Weather of a city.", "input_schema": SCHEMA},
    {"name": "search", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
]
THOUGHT = "<think>\nWhy?\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "東京"}}\n</tool_call>'
WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture
def model(site: Site) -> Site:
    """A model that thinks and calls tools."""
    site.state.service = service_with(site)
    return site


@pytest.fixture
def client(site: Site) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=site.url, api_key="any", max_retries=0, timeout=60)


def body(**fields: object) -> dict[str, object]:
    return {"model": "claude-x", "max_tokens": 100, "messages": USER, **fields}


def ask(site: Site, stream: bool, **fields: object) -> dict[str, object]:
    """The message, as the client puts it together; every byte of the answer is checked."""
    asked = body(**fields)
    if not stream:
        answer = httpx.post(site.url + PATH, json=asked)
        assert answer.status_code == 200, answer.text
        Message.model_validate_json(answer.content, strict=True)
        return answer.json()
    answer = httpx.post(site.url + PATH, json={**asked, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream"
    check_order(answer.text)
    client = anthropic.Anthropic(base_url=site.url, api_key="any", max_retries=0, timeout=60)
    with client.messages.stream(**asked) as events:
        return events.get_final_message().model_dump(mode="json")


def check_order(text: str) -> list[dict[str, object]]:
    """Every event is of its type, and they come in the order that the API promises."""
    events = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            EVENT.validate_json(data.removeprefix("data: "), strict=True)
            events.append(event)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    index = -1
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            index, is_open = index + 1, True
        assert is_open and event["index"] == index
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    return events


def content(message: dict[str, object]) -> list[tuple[object, ...]]:
    """(type, what it holds) of every block."""
    found: list[tuple[object, ...]] = []
    for block in message["content"]:
        match block["type"]:
            case "text":
                found.append(("text", block["text"]))
            case "thinking":
                assert block["signature"]
                found.append(("thinking", block["thinking"]))
            case "tool_use":
                found.append(("tool_use", block["name"], block["input"]))
    return found


ANSWERS = {
    "text": ({}, "Hello, 世界", [("text", "Hello, 世界")], "end_turn"),
    "thinking": ({}, THOUGHT + "So.", [("thinking", "Why?"), ("text", "So.")], "end_turn"),
    "omitted": (
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        THOUGHT + "So.",
        [("thinking", ""), ("text", "So.")],
        "end_turn",
    ),
    "call": (
        {"tools": TOOLS},
        "Let me see.\n" + CALL,
        [("text", "Let me see."), ("tool_use", "get_weather", {"city": "東京"})],
        "tool_use",
    ),
    "calls after thinking": (
        {"tools": TOOLS},
        THOUGHT + CALL + "\n" + CALL,
        [("thinking", "Why?"), *[("tool_use", "get_weather", {"city": "東京"})] * 2],
        "tool_use",
    ),
    "one call": (
        {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        CALL + CALL,
        [("tool_use", "get_weather", {"city": "東京"})],
        "tool_use",
    ),
    "no tools": (
        {"tools": TOOLS, "tool_choice": {"type": "none"}},
        CALL,
        [("text", CALL)],
        "end_turn",
    ),
    "blank": ({}, " \n", [], "end_turn"),
}


@WAYS
@pytest.mark.parametrize("case", ANSWERS)
def test_every_kind_of_block_whole_and_streamed(model: Site, case: str, stream: bool) -> None:
    fields, written, blocks, reason = ANSWERS[case]
    says(model, written, pieces=20)
    message = ask(model, stream, **fields)
    assert content(message) == blocks
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, None)
    assert message["model"] == "claude-x" and message["id"].startswith("msg_")
    ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)


@WAYS
def test_usage_counts_the_prompt_the_output_and_the_thinking(model: Site, stream: bool) -> None:
    says(model, THOUGHT + "So.")
    usage = ask(model, stream)["usage"]
    (asked, *_) = model.generator.asked
    assert usage["input_tokens"] == len(asked.prompt)
    assert usage["output_tokens"] == len(THOUGHT + "So.")
    assert usage["output_tokens_details"]["thinking_tokens"] > 0
    assert usage["cache_read_input_tokens"] is None


@WAYS
def test_cached_tokens_are_apart_from_the_input_when_they_are_reported(stream: bool) -> None:
    with Site(ServerConfig(cache_report=True)).serving() as site:
        usage = ask(site, stream)["usage"]
        assert usage["cache_read_input_tokens"] == 3
        assert usage["input_tokens"] == len(site.generator.asked[0].prompt) - 3


@WAYS
def test_a_stop_sequence_is_named(model: Site, stream: bool) -> None:
    says(model, "Hel", finish=Finish("stop", "END"))
    message = ask(model, stream, stop_sequences=["END"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert model.generator.asked[0].text.stop == ("END",)


@WAYS
def test_an_answer_that_is_cut_says_by_what(model: Site, stream: bool) -> None:
    says(model, "Hel", finish=Finish("length"))
    assert ask(model, stream, max_tokens=3)["stop_reason"] == "max_tokens"
    assert model.generator.asked[-1].sampling.max_new_tokens == 3
    far = ask(model, stream, max_tokens=1_000_000)
    assert far["stop_reason"] == "model_context_window_exceeded"
    asked = model.generator.asked[-1]
    assert len(asked.prompt) + asked.sampling.max_new_tokens == 4096


def test_a_call_that_is_cut_off_has_no_arguments(model: Site) -> None:
    says(model, CALL[:60], finish=Finish("length"))
    message = ask(model, False, tools=TOOLS)
    assert content(message) == [("tool_use", "get_weather", {})]
    assert message["stop_reason"] == "max_tokens"


def prompt_of(site: Site, **fields: object) -> str:
    ask(site, False, **fields)
    return site.tokenizer.decode(site.generator.asked[-1].prompt, skip_special_tokens=False)


def test_every_block_of_a_conversation_reaches_the_template(model: Site) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "A", "cache_control": None},
                                     {"type": "text", "text": "B"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "T", "signature": "s"},
            {"type": "text", "text": "C"},
            {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "X"}},
            {"type": "tool_use", "id": "c2", "name": "search", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "sun"},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": True,
             "content": [{"type": "text", "text": "no"}]},
            {"type": "text", "text": "D"},
            {"type": "document", "source": {"type": "text", "media_type": "text/plain",
                                            "data": "paper"}, "title": "Title"},
            {"type": "search_result", "title": "Page", "source": "url",
             "content": [{"type": "text", "text": "found"}]},
        ]},
    ]  # fmt: skip
    text = prompt_of(model, messages=turns, system=[{"type": "text", "text": "S"}])
    assert text == (
        "<|system|>S<|end|><|user|>A\nB<|end|>"
        '<|assistant|>C<tool_call>{"name": "get_weather", "arguments": {"city": "X"}}</tool_call>'
        '<tool_call>{"name": "search", "arguments": {}}</tool_call><|end|>'
        "<|tool|>sun<|end|><|tool|>Error: no<|end|>"
        "<|user|>D\nTitle\npaper\nPage (url)\nfound<|end|><|assistant|>"
    )


def test_the_name_and_the_thinking_reach_templates_that_read_them(site: Site) -> None:
    template = (
        "{% for m in messages %}{{ m.reasoning_content }}|{{ m.name }}|{{ m.tool_call_id }}"
        "|{{ m.content }}{% for c in m.tool_calls or [] %}>{{ c.function.name }}{% endfor %};"
        "{% endfor %}"
    )
    site.state.service = service_with(site, template)
    turns = [
        *USER,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "T", "signature": "s"},
            {"type": "tool_use", "id": "c1", "name": "search", "input": {}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]},
    ]  # fmt: skip
    assert prompt_of(site, messages=turns) == "|||Hi;T|||>search;|search|c1|;"


def test_hidden_thinking_comes_back_in_its_signature(site: Site) -> None:
    site.state.service = service_with(
        site,
        "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}",
        reasoning="qwen3",
    )
    says(site, "<think>Why?</think>So.")
    message = ask(site, True, thinking={"type": "adaptive", "display": "omitted"})
    (thought, said) = message["content"]
    assert thought["thinking"] == "" and said["text"] == "So."
    turns = [*USER, {"role": "assistant", "content": message["content"]}, *USER]
    assert "[Why?|So.]" in prompt_of(site, messages=turns)
    thought["signature"] += "?"
    refused = httpx.post(site.url + PATH, json=body(messages=turns))
    assert refused.status_code == 400 and "signature" in refused.text
    thought["signature"] = "of another server"
    assert "[|So.]" in prompt_of(site, messages=turns)


LATE = [*USER, {"role": "system", "content": [{"type": "text", "text": "Late."}]}]


def test_a_late_system_message_stays_one_where_the_template_shows_it(model: Site) -> None:
    assert prompt_of(model, messages=LATE).startswith("<|user|>Hi<|end|><|system|>Late.<|end|>")


def test_a_late_system_message_is_said_by_the_user_where_it_does_not(site: Site) -> None:
    site.state.service = service_with(
        site,
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be first.') }}{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}{% endfor %}",
    )
    said = {"role": "assistant", "content": "A"}
    turns = [*LATE, said, {"role": "system", "content": "Later."}]
    answer = httpx.post(site.url + PATH, json=body(messages=turns, system="S"))
    assert "messages[3].content" in answer.headers["x-banyan-warnings"]
    shown = site.tokenizer.decode(site.generator.asked[-1].prompt, skip_special_tokens=False)
    assert shown == "<|system|>S<|user|>Hi\nLate.<|assistant|>A<|user|>Later."


def test_the_last_message_of_the_assistant_is_continued(model: Site) -> None:
    turns = [*USER, {"role": "assistant", "content": "The answer is ("}]
    assert prompt_of(model, messages=turns).endswith("<|assistant|>The answer is (")


def test_a_billing_block_is_not_shown_and_reported(model: Site) -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2;"},
        {"type": "text", "text": "S"},
    ]
    answer = httpx.post(model.url + PATH, json=body(system=system))
    assert "billing" in answer.headers["x-banyan-warnings"]
    text = model.tokenizer.decode(model.generator.asked[-1].prompt, skip_special_tokens=False)
    assert text.startswith("<|system|>S<|end|>")


@pytest.mark.parametrize(
    ("choice", "num_tags"),
    [({"type": "any"}, 2), ({"type": "tool", "name": "search"}, 1)],
    ids=["any", "named"],
)
def test_forced_tools_bind_the_answer(model: Site, choice: dict[str, str], num_tags: int) -> None:
    says(model, CALL)
    ask(model, False, tools=TOOLS, tool_choice=choice, thinking={"type": "disabled"})
    constraint = Constraint.decode(model.generator.asked[-1].message.grammar)
    assert len(json.loads(constraint.text)["format"]["tags"]) == num_tags


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_a_schema_binds_the_answer(model: Site, place: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    fields = {place: {"format": form} if place == "output_config" else form}
    ask(model, False, **fields)
    constraint = Constraint.decode(model.generator.asked[-1].message.grammar)
    assert json.loads(constraint.text) == SCHEMA


def test_sampling_fields_arrive(model: Site) -> None:
    ask(model, False, temperature=0.5, top_p=0.25, top_k=7)
    sampling = model.generator.asked[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)


def test_disabled_thinking_reaches_the_template(model: Site) -> None:
    fields = {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}
    assert prompt_of(model, **fields).endswith("<think></think>")


def test_what_is_not_honoured_is_reported(model: Site) -> None:
    fields = body(
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 2048},
        context_management={"edits": []},
        cache_control={"type": "ephemeral"},
    )
    warned = httpx.post(model.url + PATH, json=fields).headers["x-banyan-warnings"]
    for name in ("metadata", "context_management", "claude-x"):
        assert name in warned
    assert "cache_control" not in warned and "budget" not in warned
    assert Constraint.decode(model.generator.asked[-1].message.grammar).budget == 2048


def test_members_that_nothing_reads_are_reported(model: Site) -> None:
    document = {"type": "document", "source": {"type": "text", "data": "D"}}
    document["citations"] = {"enabled": True}
    tool = {"name": "search", "input_schema": SCHEMA, "defer_loading": True}
    fields = body(
        messages=[{"role": "user", "content": [document], "mood": "x"}],
        tools=[{**tool, "cache_control": {"type": "ephemeral"}}],
        thinking={"type": "adaptive", "depth": 3},
    )
    warned = httpx.post(model.url + PATH, json=fields).headers["x-banyan-warnings"]
    for name in ("messages[0].content.citations", "messages.mood", "tools.defer_loading"):
        assert f"{name}: " in warned
    assert "thinking.depth: " in warned and "cache_control" not in warned


def test_a_tool_that_a_search_has_found_is_named_to_the_model(model: Site) -> None:
    turns = [
        {"role": "user", "content": "A"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "find", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "tool_reference", "tool_name": "search"}],
                }
            ],
        },
    ]
    assert "The tool search is available." in prompt_of(model, messages=turns)


@WAYS
def test_counted_tokens_are_those_of_the_prompt(
    model: Site, client: anthropic.Anthropic, stream: bool
) -> None:
    fields = {"system": "S", "tools": TOOLS, "messages": USER}
    counted = client.messages.count_tokens(model="claude-x", **fields)
    ask(model, stream, **fields)
    assert counted.input_tokens == len(model.generator.asked[-1].prompt)


def test_the_model_is_listed_and_found_by_name(client: anthropic.Anthropic) -> None:
    (listed,) = client.models.list()
    ModelInfo.model_validate(listed.model_dump(), strict=True)
    assert listed.id == "tiny" and listed.max_input_tokens == 4096
    assert client.models.retrieve("tiny").id == "tiny"


REFUSALS = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "an image": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "url", "url": "https://a.b/c"}}],
                }
            ]
        },
        "unsupported content type 'image_url' in messages[0]",
    ),
    "an image without a source": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].source.type must be base64 or url",
    ),
    "an unknown role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    "no messages": ({"messages": []}, "Messages cannot be empty"),
    "an unknown tool": (
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nope"}},
        "'nope' not found",
    ),
    "a small budget": ({"thinking": {"type": "enabled", "budget_tokens": 1}}, "budget_tokens"),
    "an empty stop sequence": ({"stop_sequences": [""]}, "stop_sequences"),
    "mcp servers": ({"mcp_servers": [{"url": "x"}]}, "MCP"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_requests_are_refused_in_the_api_s_words(
    model: Site, client: anthropic.Anthropic, case: str
) -> None:
    fields, words = REFUSALS[case]
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**body(), extra_body=fields)
    ErrorResponse.model_validate(refused.value.body, strict=True)
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert words in refused.value.body["error"]["message"]


def test_a_prompt_that_is_too_long_is_reported_in_the_words_that_agents_know(
    client: anthropic.Anthropic,
) -> None:
    turns = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*50\d\d tokens"):
        client.messages.create(**{**body(), "messages": turns})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (529, "overloaded_error"),
    ],
)
def test_failures_before_the_answer_have_a_status_and_a_type(
    site: Site, client: anthropic.Anthropic, status: int, kind: str
) -> None:
    site.generator.script = lambda _: steps("", finish=refusal(status))
    with pytest.raises(anthropic.APIStatusError) as failed:
        client.messages.create(**body(), stream=True)
    assert failed.value.status_code == status
    assert failed.value.body["error"]["type"] == kind


def test_a_failure_in_a_stream_is_its_last_event(site: Site, client: anthropic.Anthropic) -> None:
    site.generator.script = lambda _: steps("Hel", "", finish=refusal(503))
    answer = httpx.post(site.url + PATH, json=body(stream=True))
    name, data = answer.text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    assert name == "event: error"
    ErrorResponse.model_validate_json(data.removeprefix("data: "), strict=True)
    with pytest.raises(anthropic.APIStatusError), client.messages.stream(**body()) as events:
        events.until_done()


def test_a_large_body_is_refused_in_the_api_s_words() -> None:
    with Site(ServerConfig(max_body_bytes=100)).serving() as site:
        client = anthropic.Anthropic(base_url=site.url, api_key="any", max_retries=0)
        with pytest.raises(anthropic.RequestTooLargeError) as refused:
            client.messages.create(**body(system="S" * 200))
        assert refused.value.body["error"]["type"] == "request_too_large"


def test_both_headers_of_the_key_are_taken_and_a_wrong_key_is_reported() -> None:
    with Site(ServerConfig(api_key="right")).serving() as site:
        for given in ({"api_key": "right"}, {"auth_token": "right"}):
            client = anthropic.Anthropic(base_url=site.url, max_retries=0, **given)
            assert client.messages.create(**body()).content[0].text == "Hello"
        wrong = anthropic.Anthropic(base_url=site.url, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError) as refused:
            wrong.messages.create(**body())
        assert refused.value.body["error"]["type"] == "authentication_error"


def test_strict_servers_refuse_other_models_and_unknown_fields() -> None:
    with Site(ServerConfig(strict_requests=True)).serving() as site:
        client = anthropic.Anthropic(base_url=site.url, api_key="any", max_retries=0)
        with pytest.raises(anthropic.NotFoundError) as refused:
            client.messages.create(**body())
        assert refused.value.body["error"]["type"] == "not_found_error"
        own = {**body(), "model": "tiny"}
        assert client.messages.create(**own).content[0].text == "Hello"
        with pytest.raises(anthropic.BadRequestError, match="metadata"):
            client.messages.create(**own, metadata={"user_id": "u"})


def test_a_client_that_leaves_ends_its_request() -> None:
    with Site().serving() as site:
        site.generator.hold_after = 1
        with site.http.stream("POST", PATH, json=body(stream=True)) as answer:
            next(answer.iter_lines())
        assert site.generator.closed.acquire(timeout=60)
        assert not site.generator.open
