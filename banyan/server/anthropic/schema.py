"""The request fields of the Anthropic routes: typed, refused and harmless."""

from collections.abc import Mapping, Sequence

import msgspec

from banyan.server.openai.schema import Members

Block = dict[str, object]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message."""

    role: str
    content: str | list[Block]


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the client runs."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None
    strict: bool | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None = None
    format: dict[str, object] | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the prompt: the body of /v1/messages/count_tokens."""

    model: str
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, object] | None = None
    """The older place of `output_config.format`."""
    cache_control: dict[str, object] | None = None
    """Accepted: every shared prefix is cached without marks."""


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


MEMBERS: Mapping[str, type[msgspec.Struct]] = {
    "messages": Turn,
    "tools": Tool,
    "tool_choice": ToolChoice,
    "thinking": Thinking,
    "output_config": OutputConfig,
}
"""Field -> known members of its objects; others are reported."""

_BLOCK: Mapping[str, None] = dict.fromkeys(
    (
        *("type", "text", "cache_control", "citations", "id", "name", "input", "caller"),
        *("tool_use_id", "is_error", "thinking", "signature", "data", "source", "title"),
        *("tool_name", "media_type", "url"),
    )
)
BLOCKS: Members = {
    "system": _BLOCK,
    "messages": {"role": None, "content": {**_BLOCK, "content": _BLOCK}},
}
"""Members of blocks that are read; others are reported."""

HARMLESS_MEMBERS = frozenset(("cache_control",))
"""Members without effect, since it happens anyway."""

_NONE = (None, "", [], {})

REFUSED: Mapping[str, tuple[Sequence[object], str]] = {
    "container": (_NONE, "this server runs no code, so there is no container"),
    "mcp_servers": (_NONE, "tool servers are for /v1/responses; let the client call MCP servers"),
}

HARMLESS = frozenset(
    (
        "metadata",
        "service_tier",
        "betas",
        "inference_geo",
        "speed",
        "user_profile_id",
        "workspace_id",
        "diagnostics",
    )
)
"""Fields that do not change the answer; accepted and reported."""
