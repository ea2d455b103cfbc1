"""Hermes 2 Pro and its many descendants: JSON between <tool_call> tags.

Source: the model card of NousResearch/Hermes-2-Pro and its function-calling repository.
"""

from banyan.parsers.tool_calls.tagged import tagged_json

FORMAT = tagged_json("<tool_call>", "</tool_call>")
