"""Requests as common agents send them, one after another. Each sends back what it was answered.

An agent is a generator: it yields (path, body) and receives the answer as its client reads it. In
every one the model calls a tool, the agent runs it, and the model answers in words.
"""

import json
from collections.abc import Callable, Generator, Mapping

Body = dict[str, object]
Agent = Generator[tuple[str, Body], Body, None]

RESULT = "total 1\nREADME.md"
"""What every agent's tool returns."""
QUESTION = "What is in this folder?"

SHELL: Body = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "argv"},
        "workdir": {"type": "string"},
        "timeout_ms": {"type": "number"},
    },
    "required": ["command"],
    "additionalProperties": False,
}


def codex() -> Agent:
    """Codex CLI: the Responses API without a store, tools of many types, reasoning sent back."""
    patch = {"type": "grammar", "syntax": "lark", "definition": "start: /(.|\\n)+/"}
    items: list[object] = [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>read-only</permissions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "<environment_context>sh</environment_context>"},
                {"type": "input_text", "text": QUESTION},
            ],
        },
    ]
    body: Body = {
        "model": "gpt-5-codex",
        "instructions": "You are a coding agent.",
        "tools": [
            {
                "type": "function",
                "name": "shell",
                "description": "Runs a command",
                "strict": False,
                "parameters": SHELL,
            },
            {"type": "custom", "name": "apply_patch", "description": "Patch", "format": patch},
            {"type": "web_search", "external_web_access": False},
            {"type": "image_generation", "output_format": "png"},
            {"type": "local_shell"},
            {"type": "namespace", "name": "mcp__notes", "description": "Notes", "tools": []},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "service_tier": None,
        "prompt_cache_key": "0199-conversation",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    for _ in range(2):
        answer = yield "/v1/responses", {**body, "input": list(items)}
        for item in answer["output"]:
            kept = {name: value for name, value in item.items() if name not in ("id", "status")}
            if item["type"] == "reasoning":
                kept |= {"encrypted_content": None}
            items.append(kept)
            if item["type"] == "function_call":
                output = json.dumps({"output": RESULT, "metadata": {"exit_code": 0}})
                result = {"type": "function_call_output", "call_id": item["call_id"]}
                items.append({**result, "output": output})


def codex_after_others() -> Agent:
    """Codex CLI, with a conversation that another model and its tools began."""
    items: list[object] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Begin"}]},
        {
            "type": "reasoning",
            "summary": [],
            "content": None,
            "encrypted_content": "gAAAAA",
        },
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_p",
            "name": "apply_patch",
            "input": "*** Begin Patch",
        },
        {"type": "custom_tool_call_output", "call_id": "call_p", "output": "Success"},
        {
            "type": "local_shell_call",
            "call_id": "call_s",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "function_call", "call_id": "call_f", "name": "shell", "arguments": ""},
        {"type": "function_call_output", "call_id": "call_f", "output": "aborted"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    ]
    function = {"type": "function", "name": "shell", "strict": False, "parameters": SHELL}
    for _ in range(2):
        body = {"model": "gpt-5", "stream": True, "store": False, "tools": [function]}
        answer = yield "/v1/responses", {**body, "input": list(items)}
        for item in answer["output"]:
            items.append(item)
            if item["type"] == "function_call":
                result = {"type": "function_call_output", "call_id": item["call_id"]}
                items.append({**result, "output": [{"type": "input_text", "text": RESULT}]})


def claude_code() -> Agent:
    """Claude Code: the Messages API with cache marks, thinking, tools of the API's own."""
    mark = {"type": "ephemeral", "ttl": "1h"}
    turns: list[Body] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>today</system-reminder>"},
                {"type": "text", "text": QUESTION, "cache_control": mark},
            ],
        }
    ]
    body: Body = {
        "model": "claude-sonnet-4-5",
        "max_tokens": 32000,
        "temperature": 1,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
            {"type": "text", "text": "You are a coding agent.", "cache_control": mark},
        ],
        "tools": [
            {
                "name": "shell",
                "description": "Runs a command",
                "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema"} | SHELL,
                "cache_control": mark,
                "eager_input_streaming": True,
            },
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "bash_20250124", "name": "bash"},
            {"type": "memory_20250818", "name": "memory"},
        ],
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
    }
    counted = {name: body[name] for name in ("model", "system", "tools")}
    yield "/v1/messages/count_tokens?beta=true", {**counted, "messages": turns}
    for _ in range(2):
        answer = yield "/v1/messages?beta=true", {**body, "messages": list(turns)}
        turns.append({"role": "assistant", "content": answer["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
            | {"is_error": False, "cache_control": mark}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        turns.append({"role": "user", "content": results or [{"type": "text", "text": "Thanks"}]})


def claude_code_after_search() -> Agent:
    """Claude Code, with a history that holds a search by the API itself and a cut call."""
    searched = [
        {"type": "text", "text": "I look it up."},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "tool_use", "id": "toolu_0", "name": "shell", "input": {}},
    ]
    aborted = {"type": "tool_result", "tool_use_id": "toolu_0", "content": None, "is_error": True}
    turns: list[Body] = [
        {"role": "user", "content": "Begin"},
        {"role": "assistant", "content": searched},
        {"role": "user", "content": [aborted, {"type": "text", "text": QUESTION}]},
    ]
    tool = {"name": "shell", "input_schema": SHELL}
    for _ in range(2):
        body = {"model": "claude-haiku-4-5", "max_tokens": 512, "tools": [tool], "stream": True}
        answer = yield "/v1/messages", {**body, "messages": list(turns)}
        turns.append({"role": "assistant", "content": answer["content"]})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "content": [{"type": "text", "text": RESULT}],
            }
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        turns.append({"role": "user", "content": results or "Thanks"})


FUNCTION: Body = {
    "type": "function",
    "function": {"name": "shell", "description": "Runs a command", "parameters": SHELL},
}


def _calling(
    body: Body, said: Callable[[Body], Body], result: Callable[[Body], Body], turns: list[Body]
) -> Agent:
    """Two requests of a chat; `said` and `result` write the messages that are sent back."""
    for _ in range(2):
        message = yield "/v1/chat/completions", {**body, "messages": list(turns)}
        turns.append(said(message))
        turns.extend(map(result, message.get("tool_calls") or []))


def open_webui() -> Agent:
    """Open WebUI with native calls: its own fields in the body, calls as its stream gave them."""
    yield "/v1/models", {}

    def said(message: Body) -> Body:
        calls = [{**call, "index": i} for i, call in enumerate(message.get("tool_calls") or [])]
        found = {"role": "assistant", "content": message.get("content") or ""}
        return found | ({"tool_calls": calls} if calls else {})

    def result(call: Body) -> Body:
        return {"role": "tool", "tool_call_id": call["id"], "content": RESULT}

    body = {
        **{"model": "tiny", "stream": True, "stream_options": {"include_usage": True}},
        **{"tools": [FUNCTION], "temperature": 0.8, "seed": -1, "stop": ["<|end|>"]},
        **{"max_tokens": 512.0, "top_k": 0, "frequency_penalty": 0, "logit_bias": {}},
    }
    turns: list[Body] = [
        {"role": "system", "content": "You are helpful."},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
    ]
    yield from _calling(body, said, result, turns)
    title = {"messages": turns, "stream": False, "max_completion_tokens": 1000}
    title |= {"metadata": {"task": "title_generation"}}
    yield "/v1/chat/completions", {"model": "tiny", **title}


def langchain() -> Agent:
    """LangChain's agent over its OpenAI class: null members, empty content, results as JSON."""

    def said(message: Body) -> Body:
        calls = message.get("tool_calls")
        return {"role": "assistant", "content": None if calls else message["content"]} | (
            {"tool_calls": calls} if calls else {}
        )

    def result(call: Body) -> Body:
        content = json.dumps({"stdout": RESULT})
        return {"role": "tool", "content": content, "tool_call_id": call["id"], "name": "shell"}

    body = {
        **{"model": "tiny", "stream": False, "n": 1, "temperature": 0.0, "top_p": 1},
        **{"tools": [{**FUNCTION, "function": {**FUNCTION["function"], "strict": None}}]},
        **{"tool_choice": None, "parallel_tool_calls": True, "user": None, "stop": None},
        **{"reasoning_effort": None, "response_format": None, "seed": None},
    }
    turns: list[Body] = [{"role": "user", "content": QUESTION}]
    yield from _calling(body, said, result, turns)
    choice = {"type": "function", "function": {"name": "shell"}}
    forced = {**body, "tool_choice": choice, "parallel_tool_calls": False}
    yield "/v1/chat/completions", {**forced, "messages": turns}
    yield "/v1/chat/completions", {**body, "tool_choice": "any", "messages": turns}


def n8n() -> Agent:
    """n8n's agent: a stream, calls repeated with an empty text, and a result that is null."""

    def said(message: Body) -> Body:
        calls = message.get("tool_calls") or None
        return {"role": "assistant", "content": message.get("content") or ""} | {
            "tool_calls": calls
        }

    def result(call: Body) -> Body:
        return {"role": "tool", "content": json.dumps([{"response": RESULT}])} | {
            "tool_call_id": call["id"]
        }

    body = {
        **{"model": "tiny", "temperature": 0.7, "top_p": 1, "frequency_penalty": 0},
        **{"presence_penalty": 0, "n": 1, "stream": True, "tools": [FUNCTION]},
        **{"stream_options": {"include_usage": True}, "tool_choice": "auto"},
        **{"response_format": {"type": "text"}},
    }
    call = {"id": "call_n", "type": "function", "function": {"name": "shell", "arguments": ""}}
    turns: list[Body] = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Begin"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": None, "tool_call_id": "call_n"},
        {"role": "user", "content": QUESTION},
    ]
    yield from _calling(body, said, result, turns)


def cline() -> Agent:
    """Cline: native calls in a stream, and parts of text in every message."""

    def said(message: Body) -> Body:
        text = [{"type": "text", "text": message["content"]}] if message.get("content") else ""
        calls = message.get("tool_calls")
        return {"role": "assistant", "content": text or None} | (
            {"tool_calls": calls} if calls else {}
        )

    def result(call: Body) -> Body:
        content = [{"type": "text", "text": "[shell] Result:"}, {"type": "text", "text": RESULT}]
        return {"role": "tool", "tool_call_id": call["id"], "content": content}

    body = {
        **{"model": "tiny", "temperature": 0, "stream": True, "tools": [FUNCTION]},
        **{"stream_options": {"include_usage": True}, "tool_choice": "auto"},
        **{"parallel_tool_calls": False},
    }
    parts = [{"type": "text", "text": f"<task>{QUESTION}</task>"}, {"type": "text", "text": "env"}]
    turns: list[Body] = [
        {"role": "system", "content": "You are Cline."},
        {"role": "user", "content": parts},
    ]
    yield from _calling(body, said, result, turns)


def continue_dev() -> Agent:
    """Continue: completions with stops that are special tokens, then a chat with calls."""
    stops = ["<|end|>", "<|user|>", "\n\n", "```", "/src/"]
    fill = {"model": "tiny", "prompt": "def f(", "max_tokens": 64, "temperature": 0.01}
    yield "/v1/completions", {**fill, "stop": stops, "stream": True, "top_p": None}

    def said(message: Body) -> Body:
        calls = message.get("tool_calls")
        found = {"role": "assistant", "content": message.get("content") or " "}
        return found | ({"tool_calls": calls} if calls else {})

    def result(call: Body) -> Body:
        return {"role": "tool", "content": RESULT, "tool_call_id": call["id"]}

    body = {
        **{"model": "tiny", "max_tokens": 2048, "stream": True, "tools": [FUNCTION]},
        **{"parallel_tool_calls": False},
    }
    turns: list[Body] = [{"role": "user", "content": QUESTION}]
    yield from _calling(body, said, result, turns)


def langchain_ollama() -> Agent:
    """LangChain's Ollama class, and n8n's: options with null and -1, arguments as objects."""
    options = {
        **{"mirostat": None, "num_ctx": 2048, "num_predict": None, "repeat_penalty": None},
        **{"temperature": 0.0, "seed": -1, "stop": None, "top_k": 40.0, "top_p": None},
    }
    turns: list[Body] = [{"role": "user", "content": QUESTION, "images": []}]
    for _ in range(2):
        body = {"model": "tiny", "stream": True, "format": "", "keep_alive": "5m"}
        body |= {"options": options, "tools": [FUNCTION]}
        message = yield "/api/chat", {**body, "messages": list(turns)}
        calls = message.get("tool_calls") or []
        turns.append({"role": "assistant", "content": message["content"], "tool_calls": calls})
        turns += [
            {"role": "tool", "content": RESULT, "tool_call_id": call["id"], "images": []}
            for call in calls
        ]


AGENTS: Mapping[str, Callable[[], Agent]] = {
    "Codex": codex,
    "Codex after others": codex_after_others,
    "Claude Code": claude_code,
    "Claude Code after a search": claude_code_after_search,
    "Open WebUI": open_webui,
    "LangChain": langchain,
    "n8n": n8n,
    "Cline": cline,
    "Continue": continue_dev,
    "LangChain with Ollama": langchain_ollama,
}
