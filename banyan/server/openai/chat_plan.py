"""From a chat request to its specs, and to the form in which its answers are parsed.

The order is: tools, prompt, sampling and constraint, specs. CPU work that grows with the request:
routes call it off the event loop (`HttpExchange.read`)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from banyan.base.errors import RequestError
from banyan.chat_template.template import ChatTemplate
from banyan.media.preparation import Expanded
from banyan.messages.requests import NO_SCORES
from banyan.parsers.answer_parser import AnswerFormat
from banyan.parsers.reasoning import ReasoningFormat
from banyan.requests.constraint import start_after, with_budget
from banyan.requests.request_spec import PromptSpec, RequestContext, RequestSpec, ScoreOptions
from banyan.requests.sampling_params import (
    ParsedSampling,
    fit_prompt,
    parse_sampling,
    too_long,
)
from banyan.server.errors import Json
from banyan.server.openai.prompts import Conversation, chat_ids, checked_ids
from banyan.server.openai.schema import (
    PROMPT_MEMBERS,
    ChatRequest,
    Report,
    native_sampling,
    specs_of,
    unread_members,
)
from banyan.server.openai.tool_choice import ToolUse, tool_use
from banyan.server.state import Service
from banyan.tokenizer.tokenizer import Tokenizer

MAX_TOP_LOGPROBS = 20
_TAIL_TOKENS = 16
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class ChatPlan:
    """The sequences of one chat request, and how their text is parsed."""

    asked: list[RequestSpec]
    form: AnswerFormat
    top: int | None
    """Alternatives to report at each token; None when no log-probabilities are wanted."""
    thinking_end: int | None
    """Token that ends the thinking; None if it is not a single token."""


def plan_chat(
    context: RequestContext,
    service: Service,
    raw: Json,
    request: ChatRequest,
    route: str,
    adapter: str,
    warn: Report,
    may_shorten: bool = False,
) -> ChatPlan:
    """The plan of `request`.

    Args:
        raw: `request` as it was sent, with the fields of sampling.
        route: API of the request, for logs and metrics.
        adapter: LoRA adapter that answers; "" = the model by itself.
        warn: reports (field, why it has no effect).
        may_shorten: max_tokens beyond the context is cut; otherwise it is refused.

    Raises:
        RequestError: a field is malformed, or two exclude each other.
    """
    top = _top_logprobs(request)
    prompt, use = chat_prompt(context, service, request, warn)
    ids = fit_prompt(prompt.ids, service.limits)
    if prompt.spans and len(ids) < len(prompt.ids):
        raise too_long(len(prompt.ids), service.limits)
    longest = _max_tokens(request)
    usual = service.chat_defaults.get("max_new_tokens")
    if longest is None and isinstance(usual, int):
        longest, may_shorten = usual, True
    if may_shorten and longest is not None:
        longest = min(longest, max(1, service.limits.total - len(ids)))
    parsed = parse_sampling(
        native_sampling(raw, longest),
        prompt_len=len(ids),
        limits=service.limits,
        defaults=service.chat_defaults,
        draw_seed=service.draw_seed,
    )
    for name, why in parsed.ignored.items():
        warn(name, why)
    form = _form(service, request, use, ids)
    parsed = _guided(service, parsed, form, use, ids)
    bounds = _thinking_budget(request)
    if bounds:
        parsed = _bounded(service, parsed, form, ids, bounds, warn)

    scores = ScoreOptions(NO_SCORES if top is None else len(ids), top or 0)
    spec = PromptSpec(ids, parsed, scores, adapter, spans=prompt.spans, contents=prompt.contents)
    asked = specs_of(context, request, [spec], route)
    end = service.required_tokenizer().token_to_id(form.reasoning.end) if form.reasoning else None
    return ChatPlan(asked, form, top, end)


def chat_prompt(
    context: RequestContext, service: Service, request: ChatRequest, warn: Report
) -> tuple[Expanded, ToolUse]:
    """The prompt with its pictures, and the tools that it shows."""
    template = service.chat.template if service.chat else None
    shown = bool(template and template.takes_tools)
    if request.tools or request.tool_choice not in (None, "auto", "none"):
        use = tool_use(request, service.parsers, shown, service.tool_tag is not None, warn)
    else:
        use = ToolUse()
    given = {"messages": request.messages, "tools": list(use.offered.definitions.values())}
    shows_tools = service.tool_tag is not None or (template and template.shows_whole_tools)
    for path in unread_members(given, PROMPT_MEMBERS):
        is_shown = shows_tools and path.startswith("tools.")
        if not is_shown and not (template and template.names(path.rpartition(".")[2])):
            warn(path, "the model is not shown it")
    return _prompt(context, service, request, use, _options(request, template, warn)), use


def _prompt(
    context: RequestContext, service: Service, request: ChatRequest, use: ToolUse, options: Json
) -> Expanded:
    if request.input_ids is not None:
        return Expanded(checked_ids(request.input_ids, service, "input_ids"))
    tools = list(use.offered.definitions.values()) or None
    continues = bool(request.continue_final_message)
    chat = Conversation(request.messages, options, continues, tools=tools)
    return chat_ids(context, service, chat)


def _max_tokens(request: ChatRequest) -> int | None:
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    found = request.max_tokens if name == "max_tokens" else request.max_completion_tokens
    if found is not None and found <= 0:
        raise RequestError(f"{name} must be at least 1, got {found}", param=name)
    return found


def _top_logprobs(request: ChatRequest) -> int | None:
    top = request.top_logprobs
    if request.n_probs and not request.logprobs:
        request = msgspec.structs.replace(request, logprobs=True)
        top = request.n_probs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise RequestError(
            f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {top}", param="top_logprobs"
        )
    if top and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return (top or 0) if request.logprobs else None


def _options(request: ChatRequest, template: ChatTemplate | None, warn: Report) -> Json:
    """Variables of the template. Those that it does not read are reported."""
    variables = template.variables if template else frozenset()
    options = dict(request.chat_template_kwargs or {})
    for name in sorted(options.keys() - variables):
        warn(f"chat_template_kwargs.{name[:40]}", "the chat template does not read it")
    for field, wanted in (
        ("reasoning_effort", _effort_options(request.reasoning_effort)),
        ("thinking", _thinking_options(request.thinking)),
    ):
        read = {name: value for name, value in wanted.items() if name in variables}
        if wanted and not read:
            warn(field, "the chat template has no such switch")
        options = {**read, **options}
    return options


def _effort_options(effort: str | None) -> Json:
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise RequestError(
            f"reasoning_effort must be one of {', '.join(_EFFORTS)}, got {effort[:40]!r}",
            param="reasoning_effort",
        )
    return {"reasoning_effort": effort, **dict.fromkeys(_SWITCHES, effort != "none")}


def _thinking_options(thinking: bool | dict[str, object] | None) -> Json:
    if thinking is None:
        return {}
    kind = thinking.get("type") if isinstance(thinking, dict) else thinking
    if kind not in (True, False, "enabled", "disabled", "auto", "adaptive"):
        raise RequestError(
            'thinking must be true, false or {"type": "enabled" | "disabled"}', param="thinking"
        )
    return dict.fromkeys(_SWITCHES, kind not in (False, "disabled"))


def _form(service: Service, request: ChatRequest, use: ToolUse, ids: list[int]) -> AnswerFormat:
    reasoning = service.parsers.reasoning if service.tokenizer else None
    return AnswerFormat(
        reasoning=reasoning,
        starts_inside=bool(reasoning)
        and _starts_in_reasoning(service.required_tokenizer(), reasoning, request, ids),
        separates_reasoning=request.separate_reasoning is not False,
        streams_reasoning=not request.stream or request.stream_reasoning is not False,
        tools=use.format,
        offered=use.offered,
        max_calls=use.max_calls,
    )


def _starts_in_reasoning(
    tokenizer: Tokenizer, reasoning: ReasoningFormat, request: ChatRequest, ids: list[int]
) -> bool:
    """Whether the answer begins inside the thinking, judged by the end of the prompt."""
    content = request.messages[-1].get("content") if request.messages else None
    if request.continue_final_message and isinstance(content, str):
        return content.rfind(reasoning.start) > content.rfind(reasoning.end)
    return reasoning.starts_in_reasoning(_tail(tokenizer, ids))


def _tail(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids[-_TAIL_TOKENS:], skip_special_tokens=False)


def _guided(
    service: Service, parsed: ParsedSampling, form: AnswerFormat, use: ToolUse, ids: list[int]
) -> ParsedSampling:
    """The sampling with the grammar of the tools after the thinking, and with the parsers' markers
    kept in the text."""
    if use.is_forced and parsed.grammar:
        raise RequestError(
            "tool_choice and response_format both constrain the output; give one",
            param="tool_choice",
        )
    if not (form.reasoning or form.tools):
        return parsed
    tokenizer = service.required_tokenizer()
    shown = frozenset(tokenizer.added[m] for m in form.markers if m in tokenizer.added)
    text = replace(parsed.text, shown=shown)
    end, answer = _thinking_delimiters(service, form, tokenizer, ids)
    grammar = start_after(parsed.grammar, answer)
    if not grammar:
        grammar = use.grammar(end)
    return replace(parsed, text=text, grammar=grammar)


def _thinking_budget(request: ChatRequest) -> Mapping[str, int]:
    """Most tokens of the thinking, under vLLM's name or DashScope's; {} = no bound."""
    found = {
        name: value
        for name, value in (
            ("thinking_token_budget", request.thinking_token_budget),
            ("thinking_budget", request.thinking_budget),
        )
        if value is not None
    }
    for name, value in found.items():
        if not 1 <= value < 1 << 31:
            raise RequestError(f"{name} must be at least 1, got {value}", param=name)
    if len(set(found.values())) > 1:
        names = " and ".join(found)
        raise RequestError(f"{names} differ; give one", param="thinking_budget")
    return found


def _bounded(
    service: Service,
    parsed: ParsedSampling,
    form: AnswerFormat,
    ids: list[int],
    bounds: Mapping[str, int],
    warn: Report,
) -> ParsedSampling:
    """The sampling whose thinking is ended after so many tokens."""
    (name, budget), tokenizer = next(iter(bounds.items())), service.required_tokenizer()
    end, answer = _thinking_delimiters(service, form, tokenizer, ids)
    if not end or form.reasoning is None:
        warn(name, "the answer does not begin with thinking")
        return parsed
    if end != answer:
        warn(name, "this model's thinking ends in another part of the answer")
        return parsed
    start = tokenizer.encode(form.reasoning.start, add_special_tokens=False)
    grammar = with_budget(parsed.grammar, budget, () if form.starts_inside else start, end)
    return replace(parsed, grammar=grammar)


def _thinking_delimiters(
    service: Service, form: AnswerFormat, tokenizer: Tokenizer, ids: list[int]
) -> tuple[list[int], list[int]]:
    """Token ids that end the thinking and that begin the answer; empty without thinking."""
    reasoning = form.reasoning
    if reasoning is None:
        return [], []
    may_open = service.parsers.thinks_by_default and not _tail(tokenizer, ids).rstrip().endswith(
        reasoning.end
    )
    if not form.starts_inside and not may_open:
        return [], []
    end = tokenizer.encode(reasoning.end, add_special_tokens=False)
    if not reasoning.answer:
        return end, end
    return end, tokenizer.encode(reasoning.answer, add_special_tokens=False)
