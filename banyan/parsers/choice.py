"""Chooses the parsers of a model's answers: by flag, else by texts that its chat template contains.

The first matching row wins, so rows go from the special to the general.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from banyan.parsers.reasoning import REASONING_PARSERS, ReasoningFormat
from banyan.parsers.tool_calls import TOOL_PARSERS
from banyan.parsers.tool_calls.base import ToolFormat
from banyan.parsers.tool_calls.json_calls import with_unmarked_first_call

NONE = "none"
AS_TEXT = "hermes"
"""Format of calls if the tools are shown to the model as text."""

_TOOLS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("deepseekv41", ("｜DSML｜ calls",)),
    ("deepseekv4", ("｜DSML｜tool_calls",)),
    ("deepseekv32", ("｜DSML｜",)),
    ("minimax-m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("iquest_q1", ("<iquest_tool_call>",)),
    ("dots", ("<dots_function_call>",)),
    ("cohere_command4", ("<|START_ACTION|>",)),
    ("interns1", ("<|action_start|>", "<|plugin|>")),
    ("lfm2", ("<|tool_call_start|>",)),
    ("apertus2509", ("<|tools_prefix|>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("gigachat3", ("function call<|role_sep|>",)),
    ("granite", ("<|tool_call|>",)),
    ("hunyuan", ("<tool_sep>", "<arg_key>")),
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
    ("olmo3", ("<function_calls>",)),
    ("jamba", ("<tool_calls>",)),
)

_REASONING: Sequence[tuple[str, tuple[str, ...]]] = (
    ("gpt-oss", ("<|channel|>analysis",)),
    ("kimi", ("◁think▷",)),
    ("seed_oss", ("<seed:think>",)),
    ("minimax-m3", ("<mm:think>",)),
    ("mistral", ("[THINK]",)),
    ("gemma4", ("<|channel>thought",)),
    ("apertus2509", ("<|inner_prefix|>",)),
    ("cohere_command4", ("<|START_THINKING|>",)),
    ("step3", ("<steptml:", "<think>")),
    ("glm45", ("[gMASK]", "<think>")),
    ("deepseek-v3", ("<｜Assistant｜>", "</think>", "thinking")),
    ("deepseek-r1", ("<｜Assistant｜>", "</think>")),
    ("ernie45", ("</think>", "<response>")),
    ("hunyuan_a13b", ("</think>", "<answer>")),
    ("qwen3", ("</think>",)),
)


@dataclass(frozen=True)
class Parsers:
    """The parsers of one server; "none" and None = no parser.

    Attributes:
        thinks_by_default: the template has a switch that turns reasoning off, so the model starts
            to reason by itself unless the switch is used.
    """

    tool_name: str = NONE
    tools: ToolFormat | None = None
    reasoning_name: str = NONE
    reasoning: ReasoningFormat | None = None
    thinks_by_default: bool = False


def choose_parsers(
    tool_flag: str, reasoning_flag: str, template: str, takes_tools: bool = True
) -> Parsers:
    """The parsers for a chat template.

    Args:
        tool_flag, reasoning_flag: names of parsers; "" or "auto" = by the template.
        takes_tools: the template shows tools; otherwise they are shown as text, and calls have
            the most common format (`AS_TEXT`).

    Raises:
        ConfigError: no parser has that name.
    """
    tool = _named(tool_flag) or tool_parser_for(template)
    found = None if tool == NONE else TOOL_PARSERS.load(tool)
    if tool == NONE and not _named(tool_flag) and not takes_tools:
        tool, found = AS_TEXT, with_unmarked_first_call(TOOL_PARSERS.load(AS_TEXT))
    reasoning = _named(reasoning_flag) or reasoning_parser_for(template)
    return Parsers(
        tool,
        found,
        reasoning,
        None if reasoning == NONE else REASONING_PARSERS.load(reasoning),
        "enable_thinking" in template or reasoning == "gpt-oss",
    )


def tool_parser_for(template: str) -> str:
    """Name of the tool-call parser for a chat template; "none" = no known format."""
    return _first(_TOOLS, template)


def reasoning_parser_for(template: str) -> str:
    """Name of the reasoning parser for a chat template; "none" = no known format."""
    return _first(_REASONING, template)


def _named(flag: str) -> str:
    return "" if flag == "auto" else flag


def _first(rows: Sequence[tuple[str, tuple[str, ...]]], template: str) -> str:
    return next((name for name, texts in rows if all(t in template for t in texts)), NONE)
