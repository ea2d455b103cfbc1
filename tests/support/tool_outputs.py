"""Answers with tool calls as each family of models writes them, made from known calls.

The writers are the oracle of the parser tests and use none of the parsers.
"""

import codecs
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from banyan.parsers.tool_calls.definitions import Tools, read_tools

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
    "place": {"type": "object"},
    "tags": {"type": "array"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "rate": {"type": "number"},
}
NAMES = ("get_weather", "search", "f", "write_file")
TOOLS: Tools = read_tools(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": PROPERTIES},
            },
        }
        for name in NAMES
    ]
)

_WORDS = (
    "Paris", "naïve", "東京", "🙂", "a\tb", 'say "hi"', "back\\slash", "line\nbreak", "<tag>", "{",
    "}", "[1]", "</", "<tool", "f(x)", "'", "0", " ", "é", "x" * 40, "null", "12",
    "<|x|>", "\u2028",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, object] = field(default_factory=dict)


Writer = Callable[[random.Random, list[Call], str], str]


def text(rng: random.Random) -> str:
    return "".join(rng.choice(_WORDS) for _ in range(rng.randint(1, 6)))


def value(rng: random.Random, kind: str, depth: int = 0) -> object:
    match kind:
        case "string":
            return text(rng).strip() or "x"
        case "integer":
            return rng.choice([0, -1, 7, 10**12, rng.randint(-999, 999)])
        case "number":
            return rng.choice([0.5, -2.25, 1e20, 3])
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case "array":
            return [_any(rng, depth) for _ in range(rng.randint(0, 3))]
    return {text(rng): _any(rng, depth) for _ in range(rng.randint(0, 3))}


def _any(rng: random.Random, depth: int) -> object:
    kinds = ["string", "integer", "number", "boolean", "null"]
    kinds += ["array", "object"] if depth < 3 else []
    return value(rng, rng.choice(kinds), depth + 1)


def call(rng: random.Random) -> Call:
    chosen = rng.sample(sorted(PROPERTIES), rng.randint(0, 4))
    arguments = {}
    for name in chosen:
        kind = PROPERTIES[name].get("type") or rng.choice(["string", "null"])
        found = value(rng, str(kind))
        if name == "note" and isinstance(found, str):
            found = "note " + found  # not the text of another JSON type
        arguments[name] = found
    return Call(rng.choice(NAMES), arguments)


def lead(rng: random.Random) -> str:
    """Text before the calls; nothing that looks like the start of one."""
    return rng.choice(
        ["", "", "Let me check.", "Ça va — 東京 🙂", "a < b, [x] and {y}", "One\n\ntwo"]
    )


def dump(rng: random.Random, given: object) -> str:
    return json.dumps(
        given, ensure_ascii=rng.random() < 0.3, indent=rng.choice([None, None, None, 2])
    )


def _envelope(rng: random.Random, one: Call, arguments: str = "arguments") -> str:
    members = [
        f'"name": {json.dumps(one.name)}',
        f'"{arguments}": {dump(rng, one.arguments)}',
    ]
    if rng.random() < 0.2:
        members.reverse()
    return "{" + ", ".join(members) + "}"


def hermes(rng: random.Random, calls: list[Call], said: str) -> str:
    space = rng.choice(["\n", "", " "])
    blocks = [f"<tool_call>{space}{_envelope(rng, c)}{space}</tool_call>" for c in calls]
    return said + rng.choice(["\n", "\n\n", ""]) + "\n".join(blocks)


def llama3(rng: random.Random, calls: list[Call], said: str) -> str:
    objects = [_envelope(rng, c, "parameters") for c in calls]
    if said or rng.random() < 0.5:
        return said + "<|python_tag|>" + "; ".join(objects)
    return rng.choice(["; ", ";", "\n"]).join(objects)


def mistral(rng: random.Random, calls: list[Call], said: str) -> str:
    if rng.random() < 0.5:
        return said + "[TOOL_CALLS] [" + ", ".join(_envelope(rng, c) for c in calls) + "]"
    ids = rng.random() < 0.5
    return said + "".join(
        f"[TOOL_CALLS]{c.name}{'[CALL_ID]a1b2c3d4e' if ids else ''}[ARGS]{dump(rng, c.arguments)}"
        for c in calls
    )


def deepseekv3(rng: random.Random, calls: list[Call], said: str) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n"
        f"{dump(rng, c.arguments)}\n```<｜tool▁call▁end｜>"
        for c in calls
    ]
    return said + "<｜tool▁calls▁begin｜>" + "\n".join(blocks) + "<｜tool▁calls▁end｜>"


def deepseekv31(rng: random.Random, calls: list[Call], said: str) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>{c.name}<｜tool▁sep｜>{dump(rng, c.arguments)}<｜tool▁call▁end｜>"
        for c in calls
    ]
    return said + "<｜tool▁calls▁begin｜>" + "".join(blocks) + "<｜tool▁calls▁end｜>"


def deepseekv32(rng: random.Random, calls: list[Call], said: str) -> str:
    parts = [said, "\n\n<｜DSML｜function_calls>\n"]
    for one in calls:
        parts.append(f'<｜DSML｜invoke name="{one.name}">\n')
        if rng.random() < 0.2:
            parts.append(dump(rng, one.arguments))
        else:
            for name, item in one.arguments.items():
                is_text = isinstance(item, str)
                shown = item if is_text else dump(rng, item)
                parts.append(
                    f'<｜DSML｜parameter name="{name}" string="{str(is_text).lower()}">'
                    f"{shown}</｜DSML｜parameter>\n"
                )
        parts.append("</｜DSML｜invoke>\n")
    return "".join([*parts, "</｜DSML｜function_calls>"])


def kimi_k2(rng: random.Random, calls: list[Call], said: str) -> str:
    blocks = [
        f"<|tool_call_begin|>functions.{c.name}:{i}<|tool_call_argument_begin|>"
        f"{dump(rng, c.arguments)}<|tool_call_end|>"
        for i, c in enumerate(calls)
    ]
    body = "".join(blocks)
    return f"{said}<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def _shown(rng: random.Random, item: object) -> str:
    return item if isinstance(item, str) else dump(rng, item)


def glm45(rng: random.Random, calls: list[Call], said: str) -> str:
    line = rng.choice(["\n", ""])
    blocks = []
    for one in calls:
        pairs = [
            f"<arg_key>{k}</arg_key>{line}<arg_value>{_shown(rng, v)}</arg_value>{line}"
            for k, v in one.arguments.items()
        ]
        blocks.append(f"<tool_call>{one.name}{line}{''.join(pairs)}</tool_call>")
    return said + "\n" + "\n".join(blocks)


def qwen3_coder(rng: random.Random, calls: list[Call], said: str) -> str:
    blocks = []
    for one in calls:
        lines = [
            f"<parameter={k}>\n{_shown(rng, v)}\n</parameter>\n" for k, v in one.arguments.items()
        ]
        inner = f"<function={one.name}>\n{''.join(lines)}</function>\n"
        outer = "" if rng.random() < 0.1 else "<tool_call>\n"
        blocks.append(f"{outer}{inner}</tool_call>")
    return said + "\n" + "\n".join(blocks)


def step3(rng: random.Random, calls: list[Call], said: str) -> str:
    blocks = []
    for one in calls:
        inner = "".join(
            f'<steptml:parameter name="{k}">{_shown(rng, v)}</steptml:parameter>'
            for k, v in one.arguments.items()
        )
        blocks.append(
            f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{one.name}">{inner}'
            "</steptml:invoke><｜tool_call_end｜>"
        )
    return said + "<｜tool_calls_begin｜>" + "\n".join(blocks) + "<｜tool_calls_end｜>"


def gpt_oss(rng: random.Random, calls: list[Call], said: str) -> str:
    parts = [f"<|channel|>commentary<|message|>{said}<|end|>"] if said else []
    for one in calls:
        start = "<|start|>assistant" if parts else ""
        head = rng.choice(
            [
                f"<|channel|>commentary to=functions.{one.name} <|constrain|>json",
                f"<|channel|>commentary to=functions.{one.name}",
            ]
        )
        if rng.random() < 0.3:  # also at the start, behind the <|start|>assistant of the prompt
            head = f" to=functions.{one.name}<|channel|>commentary json"
        parts.append(f"{start}{head}<|message|>{dump(rng, one.arguments)}<|call|>")
    return "".join(parts)


def python_list(rng: random.Random, calls: list[Call], said: str, tags: tuple[str, str]) -> str:
    inner = ", ".join(_in_python(c) for c in calls)
    listed = f"[{inner}]"
    return said + (f"{tags[0]}{listed}{tags[1]}" if rng.random() < 0.3 else listed)


def _in_python(one: Call) -> str:
    return f"{one.name}({', '.join(f'{k}={v!r}' for k, v in one.arguments.items())})"


def pythonic(rng: random.Random, calls: list[Call], said: str) -> str:
    return python_list(rng, calls, said, ("<|python_start|>", "<|python_end|>"))


def lfm2(rng: random.Random, calls: list[Call], said: str) -> str:
    return python_list(rng, calls, said, ("<|tool_call_start|>", "<|tool_call_end|>"))


def olmo3(rng: random.Random, calls: list[Call], said: str) -> str:
    lines = "\n".join(_in_python(c) for c in calls)
    return f"{said}<function_calls>{rng.choice(['', chr(10)])}{lines}\n</function_calls>"


def in_tags(opener: str, closer: str, arguments: str = "arguments") -> Writer:
    """A list of JSON objects, or one object for each pair of tags."""

    def write(rng: random.Random, calls: list[Call], said: str) -> str:
        objects = [_envelope(rng, c, arguments) for c in calls]
        if rng.random() < 0.5:
            return f"{said}{opener}[\n{', '.join(objects)}\n]{closer}"
        return said + "\n".join(f"{opener}\n{one}{closer}" for one in objects)

    return write


def command(rng: random.Random, calls: list[Call], said: str) -> str:
    objects = [
        f'{{"tool_call_id": "{n}", "tool_name": {json.dumps(c.name)}, '
        f'"parameters": {dump(rng, c.arguments)}}}'
        for n, c in enumerate(calls)
    ]
    return f"{said}<|START_ACTION|>[\n    {', '.join(objects)}\n]<|END_ACTION|>"


def gigachat3(rng: random.Random, calls: list[Call], said: str) -> str:
    opener = rng.choice(["function call<|role_sep|>\n", "<|function_call|>"])
    return said + "<|message_sep|>".join(["", *(f"{opener}{_envelope(rng, c)}" for c in calls)])


def apertus(rng: random.Random, calls: list[Call], said: str) -> str:
    objects = [f"{{{json.dumps(c.name)}: {dump(rng, c.arguments)}}}" for c in calls]
    return f"{said}<|tools_prefix|>[{', '.join(objects)}]<|tools_suffix|>"


def xlam(rng: random.Random, calls: list[Call], said: str) -> str:
    listed = f"[{', '.join(_envelope(rng, c) for c in calls)}]"
    if not said and rng.random() < 0.5:
        return listed
    opener, closer = rng.choice(
        [("```json\n", "\n```"), ("<tool_call>", "</tool_call>"), ("[TOOL_CALLS]", "")]
    )
    return f"{said}\n{opener}{listed}{closer}"


def function_tags(outer: str) -> Writer:
    def write(rng: random.Random, calls: list[Call], said: str) -> str:
        written = qwen3_coder(rng, calls, said)
        return written.replace("<tool_call>", f"<{outer}>").replace("</tool_call>", f"</{outer}>")

    return write


def invoke_tags(outer: str) -> Writer:
    def write(rng: random.Random, calls: list[Call], said: str) -> str:
        blocks = []
        for one in calls:
            lines = [
                f'<parameter name="{k}">{_shown(rng, v)}</parameter>\n'
                for k, v in one.arguments.items()
            ]
            blocks.append(f'<invoke name="{one.name}">\n{"".join(lines)}</invoke>\n')
        return f"{said}\n<{outer}>\n{''.join(blocks)}</{outer}>"

    return write


def hunyuan(rng: random.Random, calls: list[Call], said: str) -> str:
    blocks = []
    for one in calls:
        pairs = [
            f"<arg_key>{k}</arg_key>\n<arg_value>{_shown(rng, v)}</arg_value>\n"
            for k, v in one.arguments.items()
        ]
        blocks.append(f"<tool_call>{one.name}<tool_sep>\n{''.join(pairs)}</tool_call>\n")
    return f"{said}<tool_calls>\n{''.join(blocks)}</tool_calls>"


def iquest(rng: random.Random, calls: list[Call], said: str) -> str:
    return glm45(rng, calls, said).replace("tool_call>", "iquest_tool_call>")


def dsml(outer: str, space: str) -> Writer:
    def write(rng: random.Random, calls: list[Call], said: str) -> str:
        written = deepseekv32(rng, calls, said)
        for name in ("invoke", "parameter", "function_calls"):
            to = outer if name == "function_calls" else name
            written = written.replace(f"｜DSML｜{name}", f"｜DSML｜{space}{to}")
        return written

    return write


def gemma4(rng: random.Random, calls: list[Call], said: str) -> str:
    def shown(item: object) -> str:
        match item:
            case str():
                return f'<|"|>{item}<|"|>'
            case list():
                return "[" + ",".join(map(shown, item)) + "]"
            case dict():
                return "{" + ",".join(f'<|"|>{k}<|"|>:{shown(v)}' for k, v in item.items()) + "}"
        return json.dumps(item)

    blocks = []
    for one in calls:
        members = ",".join(f"{k}:{shown(v)}" for k, v in one.arguments.items())
        blocks.append(f"<|tool_call>call:{one.name}{{{members}}}<tool_call|>")
    return said + "".join(blocks)


WRITERS: dict[str, Writer] = {
    "qwen": hermes,
    "qwen25": hermes,
    "qwen3_coder": qwen3_coder,
    "llama3": llama3,
    "mistral": mistral,
    "deepseekv3": deepseekv3,
    "deepseekv31": deepseekv31,
    "deepseekv32": deepseekv32,
    "kimi_k2": kimi_k2,
    "glm45": glm45,
    "gpt-oss": gpt_oss,
    "hermes": hermes,
    "pythonic": pythonic,
    "step3": step3,
    "apertus2509": apertus,
    "cohere_command4": command,
    "deepseekv4": dsml("tool_calls", ""),
    "deepseekv41": dsml("calls", " "),
    "dots": invoke_tags("dots_function_call"),
    "ernie45": in_tags("<tool_call>", "</tool_call>"),
    "gemma4": gemma4,
    "gigachat3": gigachat3,
    "granite": in_tags("<|tool_call|>", ""),
    "granite-20b-fc": in_tags("<function_call>", ""),
    "hunyuan": hunyuan,
    "interns1": in_tags("<|action_start|> <|plugin|>", "<|action_end|>", "parameters"),
    "iquest_q1": iquest,
    "jamba": in_tags("<tool_calls>", "</tool_calls>"),
    "lfm2": lfm2,
    "longcat": in_tags("<longcat_tool_call>", "</longcat_tool_call>"),
    "minimax-m2": invoke_tags("minimax:tool_call"),
    "olmo3": olmo3,
    "phi4_mini_json": in_tags("functools", ""),
    "seed_oss": function_tags("seed:tool_call"),
    "xlam": xlam,
}


def split(rng: random.Random, whole: str) -> Iterator[str]:
    """The text as a detokenizer gives it when tokens end anywhere, inside of characters too."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = whole.encode()
    widest = rng.choice([1, 2, 4, 8, 64])
    while rest:
        size = rng.randint(1, widest)
        yield decoder.decode(rest[:size], final=len(rest) <= size)
        rest = rest[size:]


def damaged(rng: random.Random, whole: str) -> str:
    """The answer with something missing, doubled or foreign in it."""
    at, to = sorted(rng.randint(0, len(whole)) for _ in range(2))
    to = min(to, at + rng.choice([0, 1, 5, 40]))
    added = rng.choice(
        ["", "", '"', "}", "{", "]", "\\", "\n", "<tool_call>", "null", whole[at:to]]
    )
    return whole[:at] + added + whole[to:]
