"""From a request of the Messages API to the equivalent chat request."""

from collections.abc import Mapping

from banyan.base.errors import RequestError
from banyan.chat_template.template import ChatTemplate
from banyan.server.anthropic.conversation import chat_messages, continues
from banyan.server.anthropic.schema import CountRequest, MessagesRequest, Tool, ToolChoice
from banyan.server.errors import Json
from banyan.server.openai.fields import Report

FIELD_NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "max_new_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""Field of a chat request -> its name in the Messages API."""

_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_MIN_BUDGET = 1024


def chat_body(request: CountRequest, template: ChatTemplate | None, report: Report) -> Json:
    """The body of a chat request.

    Args:
        template: of the model that answers.
        report: takes (field, why it is not honoured).

    Raises:
        RequestError: a field is malformed, or asks for what this server does not have.
    """
    body: Json = {
        "model": request.model,
        "messages": chat_messages(
            request.system,
            request.messages,
            template is None or template.takes_late_system,
            report,
        ),
        "continue_final_message": continues(request.messages),
        "tools": [_tool(tool, i) for i, tool in enumerate(request.tools or [])] or None,
        **_choice(request.tool_choice),
        **_thinking(request, report),
        **_form(request),
    }
    if isinstance(request, MessagesRequest):
        body |= {
            "max_tokens": request.max_tokens,
            "stop": request.stop_sequences or None,
            "stream": request.stream,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
        }
    return body


def _tool(tool: Tool, index: int) -> Json:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"tools[{index}] is of type {tool.type[:40]!r}, which this server does not run",
            param="tools",
            hint='Offer tools with an input_schema, of type "custom"',
        )
    if tool.input_schema is None:
        raise RequestError(f"tools[{index}].input_schema must be an object", param="tools")
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> Json:
    if choice is None:
        return {}
    body: Json = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if choice.type in _CHOICES:
        return {**body, "tool_choice": _CHOICES[choice.type]}
    if choice.type != "tool" or choice.name is None:
        raise RequestError(
            'tool_choice must be {"type": "auto" | "any" | "none"} or {"type": "tool", "name": …}',
            param="tool_choice",
        )
    return {**body, "tool_choice": {"type": "function", "function": {"name": choice.name}}}


def _thinking(request: CountRequest, report: Report) -> Json:
    """Template switches of thinking and effort; without `thinking` the template decides."""
    thinking = request.thinking
    effort = request.output_config.effort if request.output_config else None
    if thinking is None:
        return {"reasoning_effort": effort}
    if thinking.type not in ("enabled", "disabled", "adaptive"):
        raise RequestError(
            f"thinking.type must be enabled, disabled or adaptive, got {thinking.type[:40]!r}",
            param="thinking",
        )
    budget = thinking.budget_tokens
    if thinking.type == "enabled" and (budget is None or budget < _MIN_BUDGET):
        raise RequestError(
            f"thinking.budget_tokens must be at least {_MIN_BUDGET}, got {budget}", param="thinking"
        )
    if budget is not None:
        report("thinking.budget_tokens", "thinking is bounded by max_tokens alone")
    if thinking.display not in (None, "summarized", "omitted"):
        raise RequestError("thinking.display must be summarized or omitted", param="thinking")
    if thinking.display == "summarized":
        report("thinking.display", "thinking is shown as it is, not summarized")
    if thinking.type == "disabled" and effort is not None:
        report("output_config.effort", "not used while thinking is disabled")
        effort = None
    return {"thinking": {"type": thinking.type}, "reasoning_effort": effort}


def _form(request: CountRequest) -> Json:
    given = request.output_config.format if request.output_config else None
    form = request.output_format if given is None else given
    if form is None:
        return {}
    schema = form.get("schema")
    if form.get("type") != "json_schema" or not isinstance(schema, dict):
        raise RequestError(
            'output_config.format must be {"type": "json_schema", "schema": …}',
            param="output_config",
        )
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": schema},
        }
    }
