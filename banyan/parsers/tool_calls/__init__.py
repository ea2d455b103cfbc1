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
        "glm": f"{_HERE}.markup:GLM45",
        "glm45": f"{_HERE}.markup:GLM45",
        "glm47": f"{_HERE}.markup:GLM45",
        "gpt-oss": "banyan.parsers.harmony:TOOL_FORMAT",
        "hermes": f"{_HERE}.json_calls:HERMES",
        "kimi_k2": f"{_HERE}.json_calls:KIMI_K2",
        "llama3": f"{_HERE}.json_calls:LLAMA3",
        "mistral": f"{_HERE}.json_calls:MISTRAL",
        "pythonic": f"{_HERE}.pythonic:FORMAT",
        "qwen": f"{_HERE}.json_calls:QWEN25",
        "qwen25": f"{_HERE}.json_calls:QWEN25",
        "qwen3_coder": f"{_HERE}.markup:QWEN3_CODER",
        "step3": f"{_HERE}.markup:STEP3",
    },
    plugins="banyan.tool_parsers",
)
