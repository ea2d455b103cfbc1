"""Calls that a grammar forces (tool_choice required or a named function): JSON without any tags.

[{"name": "f", "parameters": {…}}, …]
"""

from banyan.parsers.incremental import Arriving, Reading
from banyan.parsers.tool_calls.base import Outcome, ToolFormat, attempt
from banyan.parsers.tool_calls.tagged import calls_json


def _read(source: Arriving, out: Outcome) -> Reading[None]:
    yield from attempt(source, out, "", calls_json(source, out))
    yield from source.rest(out.say)


FORMAT = ToolFormat(_read)
