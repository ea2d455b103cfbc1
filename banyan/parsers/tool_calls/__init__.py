"""The tool-call parsers by name; entry point for more: "banyan.tool_parsers"."""

from banyan.base.table import Table
from banyan.parsers.tool_calls.base import ToolFormat

_HERE = "banyan.parsers.tool_calls"

TOOL_PARSERS: Table[ToolFormat] = Table(
    "tool-call parser",
    {
        "deepseekv3": f"{_HERE}.deepseek:V3",
        "deepseekv31": f"{_HERE}.deepseek:V31",
        "deepseekv32": f"{_HERE}.deepseek:V32",
        "glm": f"{_HERE}.glm45:FORMAT",
        "glm45": f"{_HERE}.glm45:FORMAT",
        "glm47": f"{_HERE}.glm45:FORMAT",
        "gpt-oss": f"{_HERE}.gpt_oss:FORMAT",
        "hermes": f"{_HERE}.qwen:HERMES",
        "kimi_k2": f"{_HERE}.kimi_k2:FORMAT",
        "llama3": f"{_HERE}.llama3:FORMAT",
        "mistral": f"{_HERE}.mistral:FORMAT",
        "pythonic": f"{_HERE}.pythonic:FORMAT",
        "qwen": f"{_HERE}.qwen:QWEN25",
        "qwen25": f"{_HERE}.qwen:QWEN25",
        "qwen3_coder": f"{_HERE}.qwen:QWEN3_CODER",
        "step3": f"{_HERE}.step3:FORMAT",
    },
    plugins="banyan.tool_parsers",
)
