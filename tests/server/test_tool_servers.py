"""Tools of tool servers in /v1/responses: a real MCP server in a process of its own, the demo
tools, and what a request may not do. Every body and event is checked against official types."""

import asyncio
import contextlib
import gzip
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

import httpx
import openai
import pytest
from openai.types.responses import ResponseItemList

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.requests.request_spec import RequestSpec
from banyan.server.responses import route as responses_route
from banyan.server.responses.tools import ServerCalls, offered_tools
from banyan.server.tool_servers.base import MAX_OUTPUT_CHARS, ToolServers
from banyan.server.tool_servers.start import DemoServer, addresses, calculate, start_tool_servers
from tests.server.fakes import Site, Step, steps
from tests.server.talk import TEMPLATE, service_with
from tests.support.responses import MESSAGE, THINKING, ask, events, kinds, without_ids
from tests.system.serving import wait_until

T = TypeVar("T")

PATH = "/v1/responses"
SCRIPT = Path(__file__).with_name("mcp_server.py")
WEATHER = {"type": "mcp", "server_label": "weather", "require_approval": "never"}
DEMO = {"type": "mcp", "server_label": "demo", "require_approval": "never"}
FUNCTION = {"type": "function", "name": "ring", "parameters": {"type": "object"}, "strict": False}
LISTING = [
    *("output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed"),
    "output_item.done",
]
CALLING = [
    *("output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta"),
    "mcp_call_arguments.done",
]


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@contextlib.contextmanager
def mcp_process(transport: str, name: str = "weather") -> Iterator[tuple[int, subprocess.Popen]]:
    """A real server and its port; the test is skipped where the package is not installed."""
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    command = [sys.executable, str(SCRIPT), transport, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with mcp_process("streamable-http") as (found, _):
        yield found


@pytest.fixture
def talking(site: Site) -> Iterator[Site]:
    """A site whose model thinks and calls tools, with the demo tools."""
    site.state.service = service_with(site, TEMPLATE, "hermes", "qwen3")
    site.state.tool_servers = ToolServers({"demo": DemoServer()})
    yield site
    site.state.tool_servers = ToolServers()


def on(site: Site, work: Coroutine[object, object, T]) -> T:
    """Run on the server's loop."""
    return asyncio.run_coroutine_threadsafe(work, site.loop).result(60)


def using(site: Site, *names: str) -> None:
    """Start the site's tool servers as the flag does."""
    config = parse(["--model-path", "tiny", "--tool-server", ",".join(names)], Environment())
    site.state.tool_servers = on(site, start_tool_servers(config.server.tool_servers))


def writes(site: Site, *turns: str) -> None:
    """Let the model write one of `turns` each time it is asked, the last for ever."""
    rest = list(turns)

    def script(_: RequestSpec) -> list[Step]:
        text = rest.pop(0) if len(rest) > 1 else rest[0]
        return steps(text[: len(text) // 2], text[len(text) // 2 :])

    site.generator.script = script


def prompt(site: Site, index: int = -1) -> str:
    return site.tokenizer.decode(site.generator.asked[index].prompt, False)


@pytest.mark.parametrize("transport", ["sse", "streamable-http"])
def test_a_tool_of_a_real_server_is_called_and_its_answer_read(
    talking: Site, http: httpx.Client, transport: str
) -> None:
    with mcp_process(transport) as (port, _):
        using(talking, f"127.0.0.1:{port}")
        writes(talking, call("get_weather", city="Oslo"), "It is sunny.")
        body = ask(http, tools=[WEATHER])
    listing, made, message = body["output"]
    assert listing["type"] == "mcp_list_tools" and listing["server_label"] == "weather"
    shown = {tool["name"]: tool for tool in listing["tools"]}
    assert shown["get_weather"]["description"] == "Weather of a city"
    assert shown["get_weather"]["annotations"] == {"readOnlyHint": True}
    assert made["type"] == "mcp_call" and made["status"] == "completed"
    assert (made["name"], json.loads(made["arguments"])) == ("get_weather", {"city": "Oslo"})
    assert made["output"] == "sunny in Oslo" and made["error"] is None
    assert message["content"][0]["text"] == "It is sunny."
    assert "Weather of a city" in prompt(talking, 0)
    assert "<|tool|>sunny in Oslo<|end|><|assistant|>" in prompt(talking, 1)


def test_a_stream_of_calls_adds_up_to_the_whole(talking: Site, http: httpx.Client) -> None:
    both = call("calculator", expression="6*7") + call("calculator", expression="1/0")
    turns = (f"<think>hm</think>{both}", "<think></think>42")
    writes(talking, *turns)
    whole = ask(http, tools=[DEMO])
    writes(talking, *turns)
    found = events(http, tools=[DEMO])
    answers = ["mcp_call.completed", "output_item.done", "mcp_call.failed", "output_item.done"]
    assert kinds(found) == [
        *("created", "in_progress", *LISTING, *THINKING, *CALLING, *CALLING, *answers, *MESSAGE),
        "completed",
    ]
    final = found[-1]["response"]
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert final["usage"] == whole["usage"]
    done = {e["output_index"]: e["item"] for e in found if e["type"].endswith("item.done")}
    assert [done[i] for i in range(len(done))] == final["output"]
    deltas = "".join(
        e["delta"] for e in found if e["type"].endswith("delta") and e["output_index"] == 2
    )
    assert deltas == final["output"][2]["arguments"]
    assert final["output"][3]["error"] == {
        "type": "mcp_tool_execution_error",
        "content": "division by zero",
    }
    assert "<|tool|>42<|end|>" in prompt(talking) and "Error: division by zero" in prompt(talking)


def test_usage_counts_every_turn(talking: Site, http: httpx.Client) -> None:
    writes(talking, call("clock"), "Noon")
    usage = ask(http, tools=[DEMO])["usage"]
    asked = talking.generator.asked
    assert usage["input_tokens"] == sum(len(r.prompt) for r in asked)
    assert usage["output_tokens"] == len(call("clock")) + len("Noon")


def test_the_client_s_own_stream_helper_takes_calls_of_servers(talking: Site) -> None:
    writes(talking, call("calculator", expression="2+2"), "4")
    with (
        openai.OpenAI(base_url=f"{talking.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model="tiny", input="Hi", tools=[DEMO]) as stream,
    ):
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "4" and "response.mcp_call.completed" in seen
    assert final.output[1].type == "mcp_call" and final.output[1].output == "4"


def test_a_conversation_goes_on_after_calls(talking: Site, http: httpx.Client) -> None:
    writes(talking, call("calculator", expression="2+2"), "4", "Again 4")
    first = ask(http, tools=[DEMO])
    by_id = ask(http, tools=[DEMO], previous_response_id=first["id"], input="Sure?")
    said = [{"role": "user", "content": "Hi"}, *first["output"]]
    by_items = ask(http, tools=[DEMO], input=[*said, {"role": "user", "content": "Sure?"}])
    assert prompt(talking, -1) == prompt(talking, -2)
    assert "<|tool|>4<|end|><|assistant|>4<|end|><|user|>Sure?" in prompt(talking)
    for body in (by_id, by_items):
        assert [item["type"] for item in body["output"]] == ["message"], "tools are listed once"
    items = http.get(f"{PATH}/{by_items['id']}/input_items?order=asc")
    ResponseItemList.model_validate_json(items.content, strict=True)
    assert [item["type"] for item in items.json()["data"]] == [
        *("message", "mcp_list_tools", "mcp_call", "message", "message"),
    ]


def test_a_function_of_the_client_s_ends_the_response_after_the_servers_have_answered(
    talking: Site, http: httpx.Client
) -> None:
    writes(talking, call("clock") + call("ring"))
    body = ask(http, tools=[DEMO, FUNCTION])
    listing, clock, ring = body["output"]
    assert clock["output"] and ring["type"] == "function_call" and body["status"] == "completed"
    writes(talking, "Done")
    given = [{"type": "function_call_output", "call_id": ring["call_id"], "output": "rang"}]
    ask(http, tools=[DEMO, FUNCTION], previous_response_id=body["id"], input=given)
    assert prompt(talking).count("<tool_call>") == 2 and "<|tool|>rang" in prompt(talking)


@pytest.mark.parametrize("name", ["fails", "dies", "sleeps"])
def test_a_tool_that_fails_is_reported_to_the_model_and_the_next_call_works(
    talking: Site, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mcp_server = pytest.importorskip("banyan.server.tool_servers.mcp_server")
    if name == "sleeps":
        monkeypatch.setattr(mcp_server, "CALL_TIMEOUT_S", 1.0)
    with mcp_process("streamable-http") as (port, _):
        using(talking, f"127.0.0.1:{port}", "demo")
        both = [WEATHER, DEMO]
        writes(talking, call(name) + call("calculator", expression="1+1"), "Sorry")
        body = ask(http, tools=both)
        failed, worked = body["output"][2:4]
        assert failed["status"] == "failed" and failed["output"] is None
        assert (failed["error"]["type"], failed["error"].get("code")) in {
            "fails": [("mcp_tool_execution_error", None)],
            "dies": [("http_error", 502), ("mcp_protocol_error", -32000)],
            "sleeps": [("http_error", 504)],
        }[name]
        assert worked["output"] == "2" and "<|tool|>Error: " in prompt(talking)
        if name != "dies":
            monkeypatch.undo()
            writes(talking, call("get_weather", city="Rome"), "Sunny")
            assert ask(http, tools=both)["output"][2]["output"] == "sunny in Rome"


def test_a_session_that_broke_between_two_calls_is_opened_again(talking: Site, port: int) -> None:
    talking.state.tool_servers = on(talking, start_tool_servers(f"127.0.0.1:{port}"))
    (server,) = talking.state.tool_servers
    line = server.open()

    async def broken_between() -> list[str]:
        first = await line.call("get_weather", {"city": "Oslo"})
        line._session.cancel()
        await asyncio.gather(line._session, return_exceptions=True)
        second = await line.call("get_weather", {"city": "Rome"})
        await line.close()
        return [first.output, second.output]

    assert on(talking, broken_between()) == ["sunny in Oslo", "sunny in Rome"]


def test_a_long_output_is_cut_and_says_so(talking: Site, http: httpx.Client, port: int) -> None:
    talking.state.tool_servers = on(talking, start_tool_servers(f"http://127.0.0.1:{port}/mcp"))
    (server,) = talking.state.tool_servers
    line = server.open()
    outcome = on(talking, line.call("long", {"chars": MAX_OUTPUT_CHARS + 7}))
    on(talking, line.close())
    assert outcome.output.endswith(
        f"[cut: {MAX_OUTPUT_CHARS} of {MAX_OUTPUT_CHARS + 7} characters]"
    )


def test_arguments_that_are_no_object_are_reported_to_the_model() -> None:
    calls = ServerCalls(offered_tools([DEMO], ToolServers({"demo": DemoServer()}), no_report), 9)
    for text in ("[7]", '{"expression": ', "7"):
        item = {"server_label": "demo", "name": "calculator", "arguments": text}
        outcome = asyncio.run(calls.outcome(item))
        assert outcome.error == {
            "type": "mcp_protocol_error",
            "code": -32602,
            "message": "the arguments are no JSON object",
        }


def no_report(field: str, why: str) -> None:
    raise AssertionError(f"{field}: {why}")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_model_that_calls_for_ever_is_asked_for_an_answer(
    talking: Site, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    monkeypatch.setattr(responses_route, "MAX_TURNS", 3)
    writes(talking, call("clock"))
    body = events(http, tools=[DEMO])[-1]["response"] if is_stream else ask(http, tools=[DEMO])
    calls = [item for item in body["output"] if item["type"] == "mcp_call"]
    assert len(calls) == 3 and body["output"][-1]["type"] == "message"
    assert "<tools>" not in prompt(talking) and body["status"] == "completed"


def test_max_tool_calls_bounds_the_calls(talking: Site, http: httpx.Client) -> None:
    writes(talking, call("clock") + call("clock"), "Noon")
    body = ask(http, tools=[DEMO], max_tool_calls=1)
    first, second = (item for item in body["output"] if item["type"] == "mcp_call")
    assert first["status"] == "completed" and second["status"] == "failed"
    assert "may make no more calls" in second["error"]["content"]
    assert body["max_tool_calls"] == 1 and body["status"] == "completed"


def test_the_length_is_of_all_turns_together(talking: Site, http: httpx.Client) -> None:
    writes(talking, call("clock"), "Noon")
    ask(http, tools=[DEMO], max_output_tokens=200)
    lengths = [r.sampling.max_new_tokens for r in talking.generator.asked]
    assert lengths == [200, 200 - len(call("clock"))]
    talking.generator.asked.clear()
    writes(talking, call("clock"), "Noon")
    body = ask(http, tools=[DEMO], max_output_tokens=len(call("clock")))
    assert body["status"] == "incomplete" and len(talking.generator.asked) == 1


def test_a_demanded_call_is_demanded_once(talking: Site, http: httpx.Client) -> None:
    writes(talking, call("calculator", expression="3"), "3")
    choice = {"type": "mcp", "server_label": "demo", "name": "calculator"}
    body = ask(http, tools=[DEMO], tool_choice=choice)
    first, second = talking.generator.asked
    assert first.message.grammar and not second.message.grammar and body["tool_choice"] == choice


def test_allowed_tools_are_the_only_ones_shown(talking: Site, http: httpx.Client) -> None:
    writes(talking, "Hi")
    for allowed in (["clock"], {"tool_names": ["clock"]}):
        listing = ask(http, tools=[{**DEMO, "allowed_tools": allowed}])["output"][0]
        assert [tool["name"] for tool in listing["tools"]] == ["clock"]
        assert "calculator" not in prompt(talking)
    read_only = {**DEMO, "allowed_tools": {"read_only": False}}
    assert not ask(http, tools=[read_only])["output"][0]["tools"]


def test_a_server_may_be_named_by_its_address(talking: Site, http: httpx.Client, port: int) -> None:
    using(talking, f"127.0.0.1:{port}")
    writes(talking, call("get_weather", city="Oslo"), "Sunny")
    url = f"http://127.0.0.1:{port}/mcp"
    body = ask(http, tools=[{**WEATHER, "server_label": "mine", "server_url": url}])
    assert [item.get("server_label") for item in body["output"]] == ["mine", "mine", None]
    counted = http.post(f"{PATH}/input_tokens", json={"input": "Hi", "tools": [WEATHER]})
    assert counted.json()["input_tokens"] == len(talking.generator.asked[0].prompt)


class Listener:
    """A port that no request may make the server dial."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/mcp"

    def was_dialled(self) -> bool:
        try:
            self.socket.accept()
        except BlockingIOError:
            return False
        return True


@pytest.mark.parametrize("has_servers", [True, False])
def test_an_address_in_a_request_is_refused_and_not_dialled(
    talking: Site, http: httpx.Client, has_servers: bool
) -> None:
    if not has_servers:
        talking.state.tool_servers = ToolServers()
    listener = Listener()
    for label in ("demo", "other"):
        tool = {**DEMO, "server_label": label, "server_url": listener.url}
        answer = http.post(PATH, json={"input": "Hi", "tools": [tool]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools[0]"
        text = answer.json()["message"]
        assert ("labels are: demo" in text) if has_servers else ("--tool-server" in text)
    assert not listener.was_dialled() and not talking.generator.asked


@pytest.mark.parametrize(
    ("extra", "choice", "param"),
    [
        ({"server_label": "other"}, None, "tools[0]"),
        ({"server_label": 7}, None, "tools[0]"),
        ({"require_approval": "always"}, None, "tools[0]"),
        ({"require_approval": {"never": {"tool_names": ["clock"]}}}, None, "tools[0]"),
        ({"authorization": "secret"}, None, "tools[0]"),
        ({"headers": {"a": "b"}}, None, "tools[0]"),
        ({"connector_id": "connector_gmail"}, None, "tools[0]"),
        ({"allowed_tools": ["python"]}, None, "tools[0]"),
        ({}, {"type": "mcp", "server_label": "other"}, "tool_choice"),
        ({}, {"type": "mcp", "server_label": "demo", "name": "python"}, "tool_choice"),
    ],
)
def test_what_cannot_be_asked_of_a_tool_server_is_a_400(
    talking: Site, http: httpx.Client, extra: dict, choice: object, param: str
) -> None:
    body = {"input": "Hi", "tools": [{**DEMO, **extra}], "tool_choice": choice}
    answer = http.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and "secret" not in answer.text


def test_calls_without_approval_are_reported_where_never_was_not_said(
    talking: Site, http: httpx.Client
) -> None:
    tool = {"type": "mcp", "server_label": "demo", "server_description": "x"}
    warnings = http.post(PATH, json={"input": "Hi", "tools": [tool]}).headers["x-banyan-warnings"]
    assert "require_approval: " in warnings and "server_description: " in warnings


def test_a_cancelled_response_leaves_no_call_behind(
    talking: Site, http: httpx.Client, port: int
) -> None:
    using(talking, f"127.0.0.1:{port}")
    writes(talking, call("sleeps"))
    made = ask(http, tools=[WEATHER], background=True)

    def is_calling() -> bool:
        output = http.get(f"{PATH}/{made['id']}").json()["output"]
        return bool(output) and output[-1].get("status") == "calling"

    wait_until(is_calling, 60, "the call")
    ended = http.post(f"{PATH}/{made['id']}/cancel", json={}).json()
    assert ended["status"] == "cancelled" and ended["output"][-1]["status"] == "incomplete"


def test_a_server_that_is_not_there_or_not_an_address_stops_the_start() -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    for name, why in (
        ("127.0.0.1:9", "cannot be used"),
        ("demo,demo", "two servers"),
        ("ftp://a/b", "none of them"),
        ("demo,", "none of them"),
        ("localhost", "none of them"),
    ):
        with pytest.raises(ConfigError, match=why):
            asyncio.run(start_tool_servers(name))


class Liar(ThreadingHTTPServer):
    """A tool server that answers each request in one wrong way."""

    daemon_threads = True

    def __init__(self, way: str, elsewhere: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _LiarHandler)
        self.way, self.elsewhere = way, elsewhere
        self.num_asked = self.num_bytes = 0
        self.ended = threading.Event()


class _LiarHandler(BaseHTTPRequestHandler):
    server: Liar
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        liar = self.server
        liar.num_asked += 1
        self.rfile.read(int(self.headers.get("content-length", "0")))
        if liar.way == "hangs":
            liar.ended.wait(60)
            return
        self.close_connection = True
        self.send_response(307 if liar.elsewhere else 200)
        if liar.elsewhere:
            self.send_header("Location", liar.elsewhere)
        kind = "text/event-stream" if "events" in liar.way else "application/json"
        self.send_header("Content-Type", kind)
        if "packed" in liar.way:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        with contextlib.suppress(OSError):
            if liar.way.startswith("endless"):
                self.wfile.write(b"data: " if "events" in liar.way else b'"')
                while not liar.ended.is_set():
                    self.wfile.write(b"x" * 65536)
                    liar.num_bytes += 65536
            self.wfile.write(gzip.compress(bytes(1 << 20)) if "packed" in liar.way else b"lies")


@contextlib.contextmanager
def lying(way: str, elsewhere: str = "") -> Iterator[Liar]:
    with Liar(way, elsewhere) as liar:
        thread = threading.Thread(target=liar.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield liar
        finally:
            liar.ended.set()
            liar.shutdown()
            thread.join()


@pytest.mark.parametrize("path", ["mcp", "sse"])
@pytest.mark.parametrize("way", ["hangs", "endless", "endless events", "packed", "says nothing"])
def test_a_tool_server_that_hangs_or_lies_stops_the_start_in_time(
    path: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    monkeypatch.setattr("banyan.server.tool_servers.mcp_server.START_TIMEOUT_S", 2.0)
    with lying(way) as liar:
        with pytest.raises(ConfigError, match="cannot be used"):
            asyncio.run(start_tool_servers(f"http://127.0.0.1:{liar.server_port}/{path}"))
        assert liar.num_asked and liar.num_bytes < 32 << 20


@pytest.mark.parametrize("path", ["mcp", "sse"])
def test_a_tool_server_that_leads_elsewhere_is_not_followed(path: str) -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    with (
        lying("says nothing") as other,
        lying("says nothing", f"http://127.0.0.1:{other.server_port}/{path}") as liar,
    ):
        with pytest.raises(ConfigError, match="cannot be used"):
            asyncio.run(start_tool_servers(f"http://127.0.0.1:{liar.server_port}/{path}"))
        assert liar.num_asked and not other.num_asked


def test_a_start_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, "banyan.server.tool_servers.mcp_server", raising=False)
    with pytest.raises(ConfigError, match=r"pip install .*\[tools\]"):
        asyncio.run(start_tool_servers("127.0.0.1:8000"))
    assert len(asyncio.run(start_tool_servers("demo"))) == 1, "the demo tools need no package"


def test_an_address_without_a_path_is_looked_for_at_both_transports() -> None:
    assert addresses("a:1") == ["http://a:1/sse", "http://a:1/mcp"]
    assert addresses("https://a/x") == ["https://a/x"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 12", "84"),
        ("2**64", str(2**64)),
        ("-7 // 2", "-4"),
        ("sqrt(2) * pi", str(2**0.5 * 3.141592653589793)),
        ("1/4", "0.25"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("__import__('os').system('id')", "().__class__", "[i for i in (1,)]", "lambda: 1", "x"),
        *("9**9**9", "2**99999999", "1/0", "exp(1e9)", "(-8)**0.5", "", "1;2", "'a'*9", "True"),
        *("(" * 150, "9" * 300, "sqrt(1, 2)", "abs(*[1])", "round(1.5, ndigits=1)", "\0"),
        *("1 if 1 else 2", "round(1e999)", "ln(0)"),
    ],
)  # fmt: skip
def test_the_calculator_refuses_what_is_no_arithmetic_or_too_large(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        calculate(expression)


def test_the_clock_knows_zones_and_nothing_else() -> None:
    demo = DemoServer()

    def clock(**arguments: object) -> object:
        return asyncio.run(demo.call("clock", arguments))

    assert "UTC" in clock().output and "(UTC+" in clock(time_zone="Europe/Oslo").output
    assert clock(time_zone="../../etc/passwd").error["type"] == "mcp_tool_execution_error"
    assert clock(zone="UTC").error["type"] == "mcp_protocol_error"
