"""Qwen 2.5 and Qwen 3: JSON between <tool_call> tags, each on a line of its own.

Source: the chat templates of Qwen2.5-Instruct and Qwen3.
"""

from banyan.parsers.tool_calls.tagged import tagged_json

FORMAT = tagged_json("<tool_call>", "</tool_call>")
