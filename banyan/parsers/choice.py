"""Which parsers read a model's answers: named by flags, else found by the marks that the chat
template itself writes.

The first row that fits decides, so rows of a family go from the special to the general.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from banyan.parsers.reasoning import REASONING_PARSERS
from banyan.parsers.reasoning.base import ReasoningFormat
from banyan.parsers.tool_calls import TOOL_PARSERS
from banyan.parsers.tool_calls.base import ToolFormat
from banyan.parsers.tool_calls.tagged import bare_first

NONE = "none"
AS_TEXT = "hermes"
"""Format of calls where the tools are shown as text."""

_TOOLS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("deepseekv32", ("｜DSML｜",)),
    ("step3", ("<steptml:invoke",)),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("deepseekv3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseekv31", ("<｜tool▁call▁begin｜>",)),
    ("gpt-oss", ("<|channel|>", "functions.")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
    (NONE, ("]<]minimax[>[",)),  # tags of the same name, but no JSON in them
    ("qwen25", ("<tool_call>",)),
)

_REASONING: Sequence[tuple[str, tuple[str, ...]]] = (
    ("gpt-oss", ("<|channel|>analysis",)),
    ("kimi", ("◁think▷",)),
    ("step3", ("<steptml:", "<think>")),
    ("glm45", ("[gMASK]", "<think>")),
    ("deepseek-v3", ("<｜Assistant｜>", "</think>", "thinking")),
    ("deepseek-r1", ("<｜Assistant｜>", "</think>")),
    ("qwen3", ("</think>",)),
)


@dataclass(frozen=True)
class Parsers:
    """The parsers of one server; "none" and None where there is none.

    Attributes:
        thinks_unasked: the template has a switch that turns thinking off, so that without it the
            model opens its thinking by itself.
    """

    tool_name: str = NONE
    tools: ToolFormat | None = None
    reasoning_name: str = NONE
    reasoning: ReasoningFormat | None = None
    thinks_unasked: bool = False


def choose_parsers(
    tool_flag: str, reasoning_flag: str, template: str, takes_tools: bool = True
) -> Parsers:
    """The parsers for a chat template.

    Args:
        tool_flag, reasoning_flag: names that the user gave; "" or "auto" = by the template.
        takes_tools: the template shows tools; otherwise they are shown as text, and called as in
            the most common format.

    Raises:
        ConfigError: there is no parser of that name.
    """
    tool = _named(tool_flag) or tool_parser_for(template)
    found = None if tool == NONE else TOOL_PARSERS.load(tool)
    if tool == NONE and not _named(tool_flag) and not takes_tools:
        tool, found = AS_TEXT, bare_first(TOOL_PARSERS.load(AS_TEXT))
    reasoning = _named(reasoning_flag) or reasoning_parser_for(template)
    return Parsers(
        tool,
        found,
        reasoning,
        None if reasoning == NONE else REASONING_PARSERS.load(reasoning),
        "enable_thinking" in template or reasoning == "gpt-oss",
    )


def tool_parser_for(template: str) -> str:
    """Name of the tool-call parser for a chat template; "none" when it shows no format we know."""
    return _first(_TOOLS, template)


def reasoning_parser_for(template: str) -> str:
    """Name of the reasoning parser for a chat template; "none" when it marks no thinking."""
    return _first(_REASONING, template)


def _named(flag: str) -> str:
    return "" if flag == "auto" else flag


def _first(rows: Sequence[tuple[str, tuple[str, ...]]], template: str) -> str:
    return next((name for name, marks in rows if all(m in template for m in marks)), NONE)
