"""/v1/responses through the official client: every answer and every event checked strictly
against its types, the order of events, and what the store gives back."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from openai.types.responses import (
    ResponseItemList,
)

from banyan.requests.generation import Finish
from banyan.server.store.responses import ResponseStore
from tests.server.fakes import Site, refusal, steps
from tests.server.talk import TEMPLATE, says, service_with
from tests.support.responses import (
    ARGUMENTS,
    CALL,
    CALLING,
    MESSAGE,
    PATH,
    THINKING,
    TOOL,
    ask,
    checked,
    events,
    kinds,
    without_ids,
)
from tests.system.serving import wait_until


@pytest.fixture
def client(site: Site) -> Iterator[openai.OpenAI]:
    site.state.service = service_with(site, TEMPLATE, "hermes", "qwen3")
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_text_is_one_message(client: openai.OpenAI, http: httpx.Client) -> None:
    found = client.responses.create(model="tiny", input="Hi", metadata={"a": "b"})
    assert found.output_text == "Hello" and found.status == "completed"
    assert found.id.startswith("resp_") and found.metadata == {"a": "b"}
    assert found.usage.output_tokens == 5
    assert found.usage.total_tokens == found.usage.input_tokens + 5
    body = ask(http)
    assert without_ids(body["output"]) == [
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
            ],
        }
    ]


def test_a_stream_has_the_events_in_order(client: openai.OpenAI, http: httpx.Client) -> None:
    found = events(http)
    assert kinds(found) == ["created", "in_progress", *MESSAGE, "completed"]
    assert found[0]["response"]["status"] == "in_progress" and not found[0]["response"]["output"]
    assert found[-1]["response"]["usage"]["output_tokens"] == 5


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("<think>hm</think>\n\nSun", [*THINKING, *MESSAGE]),
        (CALL, CALLING),
        (f"<think>hm</think>\n\nSo:\n{CALL}\n{CALL}", [*THINKING, *MESSAGE, *CALLING, *CALLING]),
        ("", []),
    ],
)
def test_a_stream_adds_up_to_the_whole_response(
    site: Site, client: openai.OpenAI, http: httpx.Client, text: str, order: list[str]
) -> None:
    says(site, text, pieces=7)
    whole = ask(http, tools=[TOOL])
    found = events(http, tools=[TOOL])
    assert kinds(found) == ["created", "in_progress", *order, "completed"]
    final = found[-1]["response"]
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert final["usage"] == whole["usage"]
    done = [e["item"] for e in found if e["type"] == "response.output_item.done"]
    assert done == final["output"]
    for index, item in enumerate(done):
        deltas = [
            e["delta"] for e in found if e["type"].endswith(".delta") and e["output_index"] == index
        ]
        whole_text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(deltas) == whole_text


def test_the_client_s_own_stream_helper_ends_with_the_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="Hi") as stream:
        texts = [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert "".join(texts) == stream.get_final_response().output_text == "Hello"


def test_a_call_and_its_result_go_round(site: Site, client: openai.OpenAI) -> None:
    says(site, f"<think>hm</think>{CALL}")
    first = client.responses.create(model="tiny", input="Weather?", tools=[TOOL])
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("get_weather", ARGUMENTS)
    says(site, "<think></think>Sunny")
    given = [{"role": "user", "content": "Weather?"}, *first.output]
    given.append({"type": "function_call_output", "call_id": call.call_id, "output": "sun"})
    by_items = client.responses.create(model="tiny", input=given, tools=[TOOL])
    by_id = client.responses.create(
        model="tiny", input=given[-1:], tools=[TOOL], previous_response_id=first.id
    )
    assert by_items.output_text == by_id.output_text == "Sunny"
    prompts = [site.tokenizer.decode(r.prompt, False) for r in site.generator.asked[-2:]]
    assert prompts[0] == prompts[1]
    assert "<|tool|>sun" in prompts[0] and '"get_weather"' in prompts[0]


def test_instructions_lead_and_are_not_carried_over(site: Site, client: openai.OpenAI) -> None:
    given = [{"role": "developer", "content": "Short."}, {"role": "user", "content": "Hi"}]
    first = client.responses.create(model="tiny", input=given, instructions="Be kind.")
    client.responses.create(model="tiny", input="More", previous_response_id=first.id)
    one, two = (site.tokenizer.decode(r.prompt, False) for r in site.generator.asked)
    assert one.startswith("<|system|>Be kind.\n\nShort.<|end|><|user|>Hi")
    assert two.startswith("<|system|>Short.<|end|><|user|>Hi<|end|><|assistant|>Hello")
    assert "<|user|>More" in two


def test_a_late_system_message_is_said_by_whom_the_template_lets(
    site: Site, http: httpx.Client
) -> None:
    given = [{"role": "user", "content": "Hi"}, {"role": "developer", "content": "Shh."}]
    first_only = "{% if m.role == 'system' and not loop.first %}{{ 1 / 0 }}{% endif %}"
    for template, prompt in (
        (TEMPLATE, "<|user|>Hi<|end|><|system|>Shh.<|end|>"),
        (TEMPLATE.replace("{% for m in messages %}", "{% for m in messages %}" + first_only),
         "<|user|>Hi\nShh.<|end|>"),
    ):  # fmt: skip
        site.state.service = service_with(site, template)
        warnings = http.post(PATH, json={"input": given}).headers.get("x-banyan-warnings", "")
        assert site.tokenizer.decode(site.generator.asked[-1].prompt, False).startswith(prompt)
        assert ("input: the chat template" in warnings) == (template is not TEMPLATE)


def test_a_length_makes_it_incomplete(site: Site, http: httpx.Client, client: object) -> None:
    says(site, "Hello", Finish("length"))
    body = ask(http, max_output_tokens=5)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"
    assert events(http, max_output_tokens=5)[-1]["type"] == "response.incomplete"
    assert site.generator.asked[-1].sampling.max_new_tokens == 5


def test_a_stream_that_breaks_ends_as_failed(
    site: Site, http: httpx.Client, client: object
) -> None:
    site.generator.script = lambda _: steps("Hel", "", finish=refusal(500, "the device broke"))
    found = events(http)
    assert found[-1]["type"] == "response.failed"
    response = found[-1]["response"]
    assert response["error"] == {"code": "server_error", "message": "the device broke"}
    assert http.get(f"{PATH}/{response['id']}").json()["status"] == "failed"
    site.generator.script = lambda _: steps("", finish=refusal(503))
    assert http.post(PATH, json={"input": "Hi", "stream": True}).status_code == 503


def test_a_server_that_ends_says_so_in_the_stream(site: Site, client: openai.OpenAI) -> None:
    site.generator.hold_after = 1
    seen = []
    for event in client.responses.create(model="tiny", input="Hi", stream=True):
        seen.append(event.type)
        if event.type == "response.output_text.delta":
            site.call(site.app.end_all, "The server is shutting down.")
    assert seen[-1] == "response.failed"


def test_sampling_and_form_reach_the_engine(site: Site, client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    found = client.responses.create(
        model="tiny", input="Hi", temperature=0.25, top_p=0.5, text={"format": form}
    )
    asked = site.generator.asked[-1]
    assert (asked.sampling.temperature, asked.sampling.top_p) == (0.25, 0.5)
    assert "additionalProperties" in asked.message.grammar
    assert (found.temperature, found.top_p) == (0.25, 0.5)
    assert found.text.format.type == "json_schema"


def test_a_forced_tool_is_forced(site: Site, client: openai.OpenAI, http: httpx.Client) -> None:
    says(site, CALL)
    choice = {"type": "function", "name": "get_weather"}
    body = ask(http, tools=[TOOL], tool_choice=choice)
    assert site.generator.asked[-1].message.grammar and body["tool_choice"] == choice
    assert body["tools"] == [TOOL]


def test_logprobs_come_when_asked_for(http: httpx.Client, client: object) -> None:
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = ask(http, **wanted)
    (content,) = body["output"][0]["content"]
    assert [s["token"] for s in content["logprobs"]] == list("Hello")
    assert len(content["logprobs"][0]["top_logprobs"]) == 2
    done = [e for e in events(http, **wanted) if e["type"] == "response.output_text.done"]
    assert done[0]["logprobs"] == content["logprobs"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input"),
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "pope", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 1}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": 7}]}, "input"),
        ({"input": [{"type": ["message"]}]}, "input"),
        ({"input": [{"type": "reasoning", "content": ["x"]}]}, "input"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [7]}]}, "input"),
        ({"input": [{"role": "user", "content": "x", "id": 10**30}]}, None),
        ({"input": 7}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
        ({"reasoning": {"effort": "hard"}}, "reasoning.effort"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True, "store": False}, "store"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
        ({"truncation": "maybe"}, "truncation"),
    ],
)
def test_what_cannot_be_is_a_400_that_names_the_field(
    http: httpx.Client, fields: dict, param: str | None
) -> None:
    answer = http.post(PATH, json={"input": "Hi", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_what_has_no_effect_is_reported(http: httpx.Client) -> None:
    body = {"input": "Hi", "reasoning": {"summary": "auto"}, "truncation": "auto", "user": "u"}
    body |= {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}}
    warnings = http.post(PATH, json=body).headers["x-banyan-warnings"]
    for name in ("reasoning.summary", "truncation", "user", "include", "text.verbosity"):
        assert f"{name}: " in warnings


def test_a_format_that_leaves_tools_no_room_is_reported(http: httpx.Client, client: object) -> None:
    body = {"input": "Hi", "tools": [TOOL], "text": {"format": {"type": "json_object"}}}
    assert "tools: " in http.post(PATH, json=body).headers["x-banyan-warnings"]
    body["tool_choice"] = "none"
    assert "x-banyan-warnings" not in http.post(PATH, json=body).headers


def test_members_that_nothing_reads_are_reported(http: httpx.Client) -> None:
    body = {"input": "Hi", "reasoning": {"mode": "x"}, "text": {"tone": "y"}}
    warnings = http.post(PATH, json=body).headers["x-banyan-warnings"]
    assert "reasoning.mode: " in warnings and "text.tone: " in warnings


def test_a_client_may_name_its_response_once(client: openai.OpenAI, http: httpx.Client) -> None:
    assert ask(http, request_id="resp_mine-1")["id"] == "resp_mine-1"
    assert client.responses.retrieve("resp_mine-1").output_text == "Hello"
    again = http.post(PATH, json={"input": "Hi", "request_id": "resp_mine-1"})
    assert again.status_code == 400 and again.json()["error"]["param"] == "request_id"
    assert ask(http, request_id="batch-7")["id"].startswith("resp_")


def test_a_response_is_kept_until_it_is_deleted(client: openai.OpenAI, http: httpx.Client) -> None:
    made = client.responses.create(model="tiny", input="Hi")
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    unkept = client.responses.create(model="tiny", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="Hi", previous_response_id=unkept.id)


def test_input_items_are_listed_whole(client: openai.OpenAI, http: httpx.Client) -> None:
    given = [
        {"role": "user", "content": "one"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "two"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": "three"},
    ]
    made = client.responses.create(model="tiny", input=given)
    answer = http.get(f"{PATH}/{made.id}/input_items?order=asc")
    ResponseItemList.model_validate_json(answer.content, strict=True)
    shown = list(client.responses.input_items.list(made.id, order="asc", limit=2))
    assert [item.type for item in shown] == [
        *("message", "function_call", "function_call_output", "reasoning", "message"),
    ]


def test_the_store_is_bounded(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    monkeypatch.setattr("banyan.server.store.responses.MAX_RESPONSES", 3)
    site.state.responses = ResponseStore()
    made = [client.responses.create(model="tiny", input="Hi").id for _ in range(5)]
    assert len(site.state.responses) == 3
    assert client.responses.retrieve(made[-1]).id == made[-1]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made[0])
    monkeypatch.setattr("banyan.server.store.responses.MAX_BYTES", 1)
    site.state.responses = ResponseStore()
    client.responses.create(model="tiny", input="Hi")
    client.responses.create(model="tiny", input="Hi")
    assert len(site.state.responses) == 1


def test_a_background_response_is_polled(client: openai.OpenAI) -> None:
    made = client.responses.create(model="tiny", input="Hi", background=True)
    assert made.status == "queued"
    wait_until(lambda: client.responses.retrieve(made.id).status == "completed", 60, "its end")
    assert client.responses.retrieve(made.id).output_text == "Hello"


def test_a_background_response_is_cancelled_with_what_it_has(
    site: Site, client: openai.OpenAI
) -> None:
    site.generator.hold_after = 1
    made = client.responses.create(model="tiny", input="Hi", background=True)
    wait_until(lambda: client.responses.retrieve(made.id).output_text == "Hel", 60, "its start")
    ended = client.responses.cancel(made.id)
    assert ended.status == "cancelled" and ended.output_text == "Hel"
    assert not site.generator.open
    site.generator.hold_after = None
    plain = client.responses.create(model="tiny", input="Hi")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(plain.id)


def test_a_background_stream_can_be_taken_up_again(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    found = events(http, background=True)
    assert found[0]["response"]["status"] == "queued"
    id = found[0]["response"]["id"]
    again = http.get(f"{PATH}/{id}?stream=true&starting_after=3")
    assert checked(again.text, start=4) == found[4:]
    plain = ask(http)["id"]
    assert http.get(f"{PATH}/{plain}?stream=true").status_code == 400


def test_a_deleted_background_response_ends(site: Site, client: openai.OpenAI) -> None:
    site.generator.hold_after = 1
    made = client.responses.create(model="tiny", input="Hi", background=True)
    assert site.generator.started.acquire(timeout=60)
    client.responses.delete(made.id)
    wait_until(lambda: not site.generator.open, 60, "its end")


def test_a_client_that_leaves_ends_its_response(site: Site, http: httpx.Client) -> None:
    site.generator.hold_after = 1
    with http.stream("POST", PATH, json={"input": "Hi", "stream": True}) as answer:
        next(answer.iter_lines())
    wait_until(lambda: not site.generator.open, 60, "its end")


def test_input_tokens_are_counted(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="tiny", input="Hi")
    made = client.responses.create(model="tiny", input="Hi")
    assert counted.input_tokens == made.usage.input_tokens


def test_the_client_parses_a_response_by_a_schema(site: Site, client: openai.OpenAI) -> None:
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str

    says(site, '<think></think>{"city": "Oslo"}')
    found = client.responses.parse(model="tiny", input="Hi", text_format=Weather)
    assert found.output_parsed == Weather(city="Oslo")
