"""How tools are best shown to a model whose chat template has no place for them:
`python -m benchmarks.tool_prompts --url http://127.0.0.1:30000`.

Thirty questions that need one of the tools offered, and fifteen that need none: through the chat
route, and with the tools written into ChatML prompts in several ways. A call that stands in the
answer without its tags, which no parser takes for one, counts as bare. To measure the server's own
text (`parsers/tool_calls/as_text.py`) with a model whose template shows tools, start it with
--chat-template chatml.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx

from banyan.bench.evals import columns

Function = dict[str, object]
Turn = tuple[str, str]
"""Role and text."""
Ask = Callable[[Sequence[Function], str], str]
"""(tools that are offered, question) -> the answer."""
CALL = "<tool_call>"
BARE = re.compile(r"\s*(```\w*\s*)?\{\s*\"name\"")


def _function(name: str, does: str, *parameters: str) -> Function:
    properties = {each: {"type": "string"} for each in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"name": name, "description": does, "parameters": schema}


TOOLS = (
    _function("get_weather", "Get the current weather in a city.", "city"),
    _function("get_time", "Get the current time in a city.", "city"),
    _function("web_search", "Search the web.", "query"),
    _function("send_email", "Send an email.", "address", "text"),
    _function("calculate", "Evaluate an arithmetic expression.", "expression"),
    _function("get_stock_price", "Get the current price of a stock.", "symbol"),
    _function("convert_currency", "Convert money between currencies.", "amount", "from", "to"),
)
NEEDING = """
0 Paris: What is the weather in Paris?
0 Tokyo: What's the weather like in Tokyo right now?
0 London: Is it raining in London today?
0 Berlin: Tell me the current temperature in Berlin.
0 Rome: Do I need an umbrella in Rome?
0 Madrid: How is the weather in Madrid?
0 Cairo: Get the weather for Cairo.
0 Moscow: Is it cold in Moscow?
1 Sydney: What time is it in Sydney?
1 New York: What is the current time in New York?
1 Lisbon: Tell me the time in Lisbon.
1 Delhi: What's the time in Delhi?
2 Mars: Search the web for news about Mars.
2 solar: Find recent articles about solar energy.
2 football: Look up the latest football results.
2 Oslo: Search for cheap flights to Oslo.
3 anna@example.com: Send an email to anna@example.com saying that I am late.
3 bob@example.com: Email bob@example.com: the meeting is at noon.
3 sue@example.com: Write to sue@example.com that the parcel has arrived.
4 1234: Calculate 1234 * 5678.
4 98765: What is 98765 divided by 43?
4 8.5: Use the calculator to add 8.5 and 17.25.
4 17: Calculate 17 * 23 + 5.
5 AAPL: What is the price of Apple stock, AAPL?
5 MSFT: How much is one share of MSFT?
5 TSLA: Get the current stock price of TSLA.
5 NVDA: What does NVDA cost?
6 100: Convert 100 dollars to euros.
6 50: How much is 50 pounds in yen?
6 250: Change 250 Swiss francs to dollars.
""".strip().splitlines()
"""Number of the tool, what its arguments must contain, the question."""
NEEDING_NONE = """
Paris: What is the capital of France?
Shakespeare: Who wrote Romeo and Juliet?
[Cc]old: What is the opposite of hot?
[Hh]ello|[Hh]i: Say hello.
blue: What colour is the sky?
[Aa]pple|[Oo]range|[Bb]anana|[Mm]ango: Name a fruit.
Berlin: What is the capital of Germany?
7|[Ss]even: How many days are in a week?
chat: Translate into French: cat
[Dd]og: Write a sentence about dogs.
[Cc]at: Which animal says meow?
[Ww]ater: What is H2O?
[Yy]es|cold: Is ice cold?
Jupiter: What is the largest planet?
[Ww]elcome: Thank you!
""".strip().splitlines()
"""A pattern of right answers, the question."""


def _call(name: str, **arguments: str) -> str:
    return f"{CALL}\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _listed(tools: Sequence[Function]) -> str:
    return "\n".join(map(json.dumps, tools))


def an_object(tools: Sequence[Function], question: str) -> list[Turn]:
    """The whole call as one object to write, without a word on answers that need none."""
    text = (
        f"You call functions. Their signatures:\n<tools>\n{_listed(tools)}\n</tools>\n"
        "Call one or more of them for the user. Return each call as JSON within tags:\n"
        f'{CALL}\n{{"name": <name>, "arguments": <object>}}\n</tool_call>'
    )
    return [("system", text), ("user", question)]


def short_list(tools: Sequence[Function], question: str) -> list[Turn]:
    lines = [f"- {t['name']}({', '.join(_parameters(t))}): {t['description']}" for t in tools]
    how = f'To use a tool, reply only with {CALL}{{"name": …, "arguments": {{…}}}}</tool_call>.'
    return [("system", "\n".join(["Tools:", *lines, how])), ("user", question)]


def an_example(tools: Sequence[Function], question: str) -> list[Turn]:
    """Two turns before: one with a call of another tool, one without."""
    other = _function("look_up_word", "Look up a word in the dictionary.", "word")
    text = (
        f"You can call functions:\n<tools>\n{_listed([other, *tools])}\n</tools>\n"
        f"If one of them helps, answer with a call in {CALL} tags. If none does, answer in words."
    )
    call = _call("look_up_word", word="tree")
    before = [("user", "Look up the word 'tree'."), ("assistant", call)]
    before += [("user", "Hello!"), ("assistant", "Hello! How can I help?")]
    return [("system", text), *before, ("user", question)]


def its_own_example(tools: Sequence[Function], question: str) -> list[Turn]:
    """As the one before, with an empty call of the first tool that is offered."""
    text = (
        f"You can call functions:\n<tools>\n{_listed(tools)}\n</tools>\n"
        f"If one of them helps, answer with a call in {CALL} tags. If none does, answer in words."
    )
    call = _call(str(tools[0]["name"]), **dict.fromkeys(_parameters(tools[0]), "..."))
    before = [("user", f"Please use {tools[0]['name']}."), ("assistant", call)]
    before += [("user", "Hello!"), ("assistant", "Hello! How can I help?")]
    return [("system", text), *before, ("user", question)]


def _parameters(tool: Function) -> list[str]:
    schema = tool["parameters"]
    assert isinstance(schema, dict)
    return list(schema["properties"])


Form = Callable[[Sequence[Function], str], list[Turn]]
FORMS: dict[str, Form] = {
    "an object to write": an_object,
    "a short list": short_list,
    "an example of another tool": an_example,
    "an example of the first tool": its_own_example,
}


def measure(ask: Ask, name: str, offered: int) -> list[str]:
    """One row of the table."""

    def answers(asked: Sequence[tuple[int, str]]) -> list[str]:
        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(lambda it: ask(_offered(it[0], offered), it[1]), asked))

    needing = [re.fullmatch(r"(\d) (.+?): (.+)", line) for line in NEEDING]
    wanted = [(int(m[1]), m[2], m[3]) for m in needing if m]
    heard = answers([(tool, text) for tool, _, text in wanted])
    called = [CALL in answer for answer in heard]
    bare = sum(BARE.match(answer) is not None for answer in heard)
    named = [
        is_call and str(TOOLS[tool]["name"]) in answer
        for is_call, answer, (tool, _, _) in zip(called, heard, wanted, strict=True)
    ]
    right = [
        is_named and argument in answer
        for is_named, answer, (_, argument, _) in zip(named, heard, wanted, strict=True)
    ]
    none = [line.split(": ", 1) for line in NEEDING_NONE]
    plain = answers([(at % len(TOOLS), text) for at, (_, text) in enumerate(none)])
    needless = sum(CALL in answer or BARE.match(answer) is not None for answer in plain)
    fine = [
        CALL not in answer and not BARE.match(answer) and bool(re.search(pattern, answer))
        for answer, (pattern, _) in zip(plain, none, strict=True)
    ]
    counts = (bare, sum(called), sum(named), sum(right), needless, sum(fine))
    return [name, str(offered), *map(str, counts)]


def _offered(tool: int, number: int) -> list[Function]:
    return [TOOLS[(tool + i) % len(TOOLS)] for i in range(number)]


def _prompt(turns: Sequence[Turn]) -> str:
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{said}<|im_start|>assistant\n"


def _by_chat(client: httpx.Client, tools: Sequence[Function], question: str) -> str:
    """The answer, with its calls written as Hermes does."""
    offered = [{"type": "function", "function": tool} for tool in tools]
    messages = [{"role": "user", "content": question}]
    body = {"model": "m", "messages": messages, "tools": offered, "max_tokens": 64}
    reply = client.post("/v1/chat/completions", json={**body, "temperature": 0})
    message = reply.raise_for_status().json()["choices"][0]["message"]
    calls = [each["function"] for each in message["tool_calls"] or ()]
    return (message["content"] or "") + "".join(
        f"{CALL}{call['name']} {call['arguments']}" for call in calls
    )


def _by_prompt(client: httpx.Client, form: Form, tools: Sequence[Function], question: str) -> str:
    settings = {"temperature": 0, "max_new_tokens": 64, "skip_special_tokens": False}
    body = {"text": _prompt(form(tools, question)), "sampling_params": settings}
    return client.post("/generate", json=body).raise_for_status().json()["text"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tool_prompts", description=__doc__)
    parser.add_argument(
        "--url", default="http://127.0.0.1:30000", help="a server of a ChatML model"
    )
    url = parser.parse_args().url
    with httpx.Client(base_url=url, timeout=300) as client:
        asks = {"the chat route": partial(_by_chat, client)}
        asks |= {name: partial(_by_prompt, client, form) for name, form in FORMS.items()}
        head = ["tools as", "offered", "bare", "calls", "right tool", "and arguments"]
        head += ["needless", "right"]
        rows = [measure(ask, name, offered) for name, ask in asks.items() for offered in (1, 3)]
    print("\n".join(columns([head, *rows])))
    print(f"of {len(NEEDING)} that need a tool (4 columns), and {len(NEEDING_NONE)} that need none")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
