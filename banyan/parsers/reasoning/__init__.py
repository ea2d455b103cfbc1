"""The reasoning parsers by name; entry point for more: "banyan.reasoning_parsers"."""

from banyan.base.table import Table
from banyan.parsers.reasoning.base import ReasoningFormat

_HERE = "banyan.parsers.reasoning"

REASONING_PARSERS: Table[ReasoningFormat] = Table(
    "reasoning parser",
    {
        "deepseek-r1": f"{_HERE}.think:ALWAYS",
        "deepseek-v3": f"{_HERE}.think:WHEN_OPENED",
        "glm45": f"{_HERE}.think:WHEN_OPENED",
        "gpt-oss": f"{_HERE}.gpt_oss:FORMAT",
        "kimi": f"{_HERE}.think:KIMI",
        "qwen3": f"{_HERE}.think:WHEN_OPENED",
        "qwen3-thinking": f"{_HERE}.think:ALWAYS",
        "step3": f"{_HERE}.think:ALWAYS",
    },
    plugins="banyan.reasoning_parsers",
)
