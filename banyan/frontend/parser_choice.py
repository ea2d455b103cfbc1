"""Which parsers fit a chat template: found by the marks that the template itself writes.

The first row that fits decides, so rows of a family go from the special to the general.
"""

from collections.abc import Sequence

AUTO, NONE = "", "none"

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
    ("qwen25", ("<tool_call>",)),
)

_REASONING: Sequence[tuple[str, tuple[str, ...]]] = (
    ("gpt-oss", ("<|channel|>analysis",)),
    ("kimi", ("◁think▷",)),
    ("step3", ("<steptml:", "<think>")),
    ("glm45", ("[gMASK]", "<think>")),
    ("deepseek-v3", ("<｜Assistant｜>", "</think>", "thinking")),
    ("deepseek-r1", ("<｜Assistant｜>", "</think>")),
    ("qwen3", ("</think>", "enable_thinking")),
    ("qwen3", ("<think>",)),
)


def tool_parser_for(template: str) -> str:
    """Name of the tool-call parser for a chat template; "none" when it shows no format we know."""
    return _first(_TOOLS, template)


def reasoning_parser_for(template: str) -> str:
    """Name of the reasoning parser for a chat template; "none" when it marks no thinking."""
    return _first(_REASONING, template)


def _first(rows: Sequence[tuple[str, tuple[str, ...]]], template: str) -> str:
    return next((name for name, marks in rows if all(m in template for m in marks)), NONE)
