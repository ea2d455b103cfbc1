"""Chat templates: messages to the text of a prompt, and to its token ids.

Text in a message never becomes a control token. A marker separates message content from template
text: a Unicode noncharacter that occurs nowhere in the request. It is put into the text of every
control token in the request's strings, survives the template, and is removed from the result. Its
positions are the characters that no control token may include.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from banyan.base.errors import ModelError, RequestError
from banyan.base.log import printable
from banyan.chat_template.processes import (
    TIME_S,
    TemplateFailed,
    TemplateProcesses,
    TemplateRefused,
    TemplateStopped,
)
from banyan.tokenizer.tokenizer import Tokenizer, any_of

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True)
class RenderedChat:
    """A prompt's text. The character before each position in `guards` (ascending) is content;
    no control token may include it."""

    text: str
    guards: tuple[int, ...] = ()


class ControlTexts:
    """Finds and marks control tokens in the strings that a request brings."""

    def __init__(self, texts: Collection[str]) -> None:
        self._pattern = any_of(texts)
        self._beginnings = frozenset(text[:i] for text in texts for i in range(1, len(text)))
        self._reach = max(map(len, texts), default=0)

    def occurs_in(self, text: str) -> bool:
        """Whether `text` has a control token, or ends with the beginning of one."""
        return self._ends_inside(text) or self._pattern.search(text) is not None

    def mark(self, text: str, mark: str) -> str:
        """Put `mark` after the first character of each control token, and after a beginning of
        one at the end, which the template's following text could complete."""
        parts: list[str] = []
        at = 0
        while (match := self._pattern.search(text, at)) is not None:
            parts += [text[at : match.start() + 1], mark]
            at = match.start() + 1
        return "".join(parts) + text[at:] + (mark if self._ends_inside(text) else "")

    def _ends_inside(self, text: str) -> bool:
        return any(text[-i:] in self._beginnings for i in range(1, min(self._reach, len(text) + 1)))


def strings_of(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_of(key)
            yield from strings_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_of(item)


def mapped(value: object, change: Callable[[str], str]) -> object:
    """A copy of `value` with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {mapped(key, change): mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(item, change) for item in value]
    return value


def unused(inputs: object, nth: int) -> str:
    """The nth noncharacter that occurs nowhere in the inputs."""
    taken: set[str] = set()
    for text in strings_of(inputs):
        taken.update(c for c in _NONCHARACTERS if c in text or _escaped(c) in text)
    free = [c for c in _NONCHARACTERS if c not in taken]
    if nth >= len(free):
        raise RequestError("the messages use every Unicode noncharacter", param="messages")
    return free[nth]


def unmarked(text: str, mark: str) -> RenderedChat:
    """Remove the markers, also the ones that the template wrote as JSON escapes."""
    pieces = text.replace(_escaped(mark), mark).split(mark)
    guards: list[int] = []
    length = 0
    for piece in pieces[:-1]:
        length += len(piece)
        guards.append(length)
    return RenderedChat("".join(pieces), tuple(guards))


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


Message = Mapping[str, object]

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Template variables that a request may not set by name; "tokenize" is refused with them."""

_PROBE_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "PROBE_TOOL",
        "description": "D",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        "x-member": "PROBE_MEMBER",
    },
}

_PROBE_TIME_S = 2.0
"""CPU seconds for one rendering at load."""

REASONING_MEMBERS = ("reasoning_content", "thinking", "reasoning")


NO_VARIABLES: Mapping[str, object] = {}


class ChatTemplate:
    """A compiled chat template. Thread-safe.

    Args:
        source: jinja2 text.
        named: "bos_token" … → text, as variables of the template.
        special: texts that are always control tokens.
        added: other added texts of the tokenizer; one that the template writes and does not search
            for in messages is a control token too.
        time_s: CPU seconds for one rendering.

    Raises:
        ModelError: the template does not compile, or the sandbox refuses it.
    """

    def __init__(
        self,
        source: str,
        named: Mapping[str, str] | None = None,
        special: Collection[str] = (),
        added: Collection[str] = (),
        time_s: float = TIME_S,
    ) -> None:
        self.source = source
        self._named = dict(named or {})
        self._time_s = time_s
        try:
            self._processes = TemplateProcesses(source, min(time_s, _PROBE_TIME_S))
        except (TemplateStopped, TemplateRefused, TemplateFailed) as error:
            raise _model_error(error) from None
        written, sought = self._processes.written, self._processes.sought
        marks = {t for t in added if not t.isspace() and t in written and t not in sought}
        self.variables = self._processes.variables
        """Names that the template reads from outside."""
        self._control = ControlTexts(marks | set(special))
        self._probe()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: object,
    ) -> str:
        """The prompt's text.

        Raises:
            RequestError: the template refuses the messages (its own words), fails on them, or goes
                beyond a bound; `variables` has a reserved name.
        """
        return self.render_guarded(
            messages, tools, add_generation_prompt, continue_final_message, variables
        ).text

    def render_guarded(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] = NO_VARIABLES,
    ) -> RenderedChat:
        """As `render`, with the positions where content looks like a control token."""
        if taken := sorted((RESERVED | {"tokenize"}) & variables.keys()):
            raise RequestError(
                f"chat_template_kwargs may not set {', '.join(taken)}", param="chat_template_kwargs"
            )
        inputs: dict[str, object] = {
            "messages": [self._adapted(message) for message in messages],
            "tools": tools,
            **variables,
        }
        end = unused(inputs, 0) if continue_final_message else ""
        is_marked = any(map(self._control.occurs_in, strings_of(inputs)))
        mark = unused(inputs, 1) if is_marked else ""
        last_call = None
        if end:
            messages = cast(list[dict[str, object]], inputs["messages"])
            last_call = _open_call(messages, end)
            if last_call is None:
                _append(messages, end + " ")
        if mark:
            inputs = cast(dict[str, object], mapped(inputs, lambda s: self._control.mark(s, mark)))
        text = self._render({"add_generation_prompt": add_generation_prompt, **inputs})
        if last_call is not None:
            if mark:
                last_call = self._control.mark(last_call, mark)
            text = _cut_before(text, end) + last_call
        elif end:
            text = _cut(text, end)
        return unmarked(text, mark) if mark else RenderedChat(text)

    def names(self, member: str) -> bool:
        """Whether the template's source has this name of a message's or a tool's member."""
        return member in self.source

    def _render(self, variables: Mapping[str, object]) -> str:
        try:
            return self._processes.render({**self._named, **variables}, self._time_s)
        except TemplateStopped as error:
            raise RequestError(f"the chat template was stopped: {error}") from None
        except TemplateRefused as error:
            raise RequestError(str(error) or "the chat template failed") from None
        except TemplateFailed as error:
            raise RequestError(
                f"the chat template cannot render these messages: {printable(str(error))}",
                param="messages",
            ) from None

    def _adapted(self, message: Message) -> dict[str, object]:
        """A copy of the message in the form that this template reads."""
        adapted = dict(message)
        reasoning = next(
            (adapted[k] for k in REASONING_MEMBERS if adapted.get(k) is not None), None
        )
        if reasoning is not None:
            adapted = {"thinking": reasoning, **adapted, "reasoning_content": reasoning}
        content = adapted.get("content")
        if content is None and not self.takes_no_content:
            adapted["content"] = content = ""
        if isinstance(content, list) and not self.takes_parts:
            adapted["content"] = " ".join(_part_texts(content))
        elif isinstance(content, str) and not self.takes_text:
            adapted["content"] = [{"type": "text", "text": content}]
        if self.takes_argument_objects and isinstance(adapted.get("tool_calls"), list):
            calls = cast(list[object], adapted["tool_calls"])
            adapted["tool_calls"] = [_with_argument_object(call) for call in calls]
        return adapted

    def _probe(self) -> None:
        """Find out which message form the template reads, by rendering small examples.

        Raises:
            ModelError: the sandbox stops it even on these.
        """
        self.takes_text = self.takes_parts = True
        self.takes_argument_objects = False
        user = {"role": "user", "content": "PROBE"}
        parts = {"role": "user", "content": [{"type": "text", "text": "PROBE"}]}
        text, listed = self._tried([user]), self._tried([parts])
        # A template that only joins strings fails on a list or writes it as Python spells it.
        self.takes_parts = "PROBE" in listed and "'type'" not in listed and '"type"' not in listed
        self.takes_text = "PROBE" in text or not self.takes_parts
        given, wanted = '{"ARGUMENT": 1}', {"ARGUMENT": 1}
        without_content = self._tried([user, _call(given, None)])
        # Some fail on a message without content, others write Python's word for it.
        self.takes_no_content = bool(without_content) and "None" not in without_content
        content = None if self.takes_no_content else ""
        as_text = self._tried([user, _call(given, content)])
        as_object = self._tried([user, _call(wanted, content)])
        self.takes_argument_objects = given not in as_text and "ARGUMENT" in as_object
        self.takes_calls = "PROBE_CALL" in as_text or "PROBE_CALL" in as_object
        system = {"role": "system", "content": "SYSTEM"}
        self.takes_system = "SYSTEM" in self._tried([system, user])
        shown = [self._tried(m, [_PROBE_TOOL]) for m in ([user], [system, user])]
        late = {"role": "system", "content": "LATE"}
        self.takes_late_system = "LATE" in self._tried([system, user, late])
        self.takes_tools = any("PROBE_TOOL" in text for text in shown)
        self.shows_whole_tools = any("PROBE_MEMBER" in text for text in shown)

    def _tried(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
        variables = {"messages": messages, "tools": tools, "add_generation_prompt": False}
        try:
            time_s = min(self._time_s, _PROBE_TIME_S)
            return self._processes.render({**self._named, **variables}, time_s)
        except TemplateStopped as error:
            raise _model_error(error) from None
        except (TemplateRefused, TemplateFailed):
            return ""  # the template refuses this message form


class Chat:
    """Messages to token ids, with one tokenizer and its template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.template = template

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] = NO_VARIABLES,
        fit: Callable[[str], str] = str,
    ) -> list[int]:
        """Render and encode the prompt; text in messages stays text. Raises RequestError.

        Args:
            fit: refuses or shortens a text that is too long to tokenise.
        """
        rendered = self.template.render_guarded(
            messages, tools, add_generation_prompt, continue_final_message, variables
        )
        return self.tokenizer.encode_guarded(fit(rendered.text), rendered.guards)


def load_chat(tokenizer: Tokenizer, source: str | None = None) -> Chat:
    """The chat side of a tokenizer.

    Args:
        source: a template that replaces the model's own.

    Raises:
        ModelError: there is no template, or it is refused.
    """
    source = tokenizer.facts.chat_template if source is None else source
    if source is None:
        raise ModelError(
            f"the model {printable(tokenizer.facts.source)!r} has no chat template",
            "give one with --chat-template, or use /v1/completions",
        )
    template = ChatTemplate(
        source, tokenizer.facts.named, tokenizer.special_texts, tokenizer.added.keys()
    )
    return Chat(tokenizer, template)


def _open_call(messages: list[dict[str, object]], end: str) -> str | None:
    """Put `end` in place of the last call's arguments, and return them; None without a call."""
    calls = messages[-1].get("tool_calls") if messages else None
    call = calls[-1] if isinstance(calls, list) and calls else None
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(calls, list) or not isinstance(function, Mapping):
        return None
    given = function.get("arguments")
    marked = {**cast(Message, call), "function": {**function, "arguments": end}}
    messages[-1]["tool_calls"] = [*calls[:-1], marked]
    return given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)


def _cut_before(text: str, end: str) -> str:
    """Cut `text` where the arguments of the last call begin."""
    text = text.replace(_escaped(end), end)
    at = text.rfind(end)
    if at < 0:
        raise RequestError(
            "the chat template does not write the arguments of a call as JSON, so a message that "
            "ends with one cannot be continued",
            param="continue_final_message",
        )
    is_quoted = text[at - 1 : at] == '"' and text[at + len(end) : at + len(end) + 1] == '"'
    return text[: at - 1 if is_quoted else at]


def _append(messages: list[dict[str, object]], end: str) -> None:
    """Append `end` to the text of the last message, which the answer continues."""
    content = messages[-1].get("content") or "" if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + end
        return
    parts = list(content) if isinstance(content, list) else []
    for i in reversed(range(len(parts))):
        part = parts[i]
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            parts[i] = {**part, "text": part["text"] + end}
            messages[-1]["content"] = parts
            return
    raise RequestError(
        "continue_final_message needs a last message with text", param="continue_final_message"
    )


def _cut(text: str, end: str) -> str:
    """Cut `text` at the end of the last message."""
    at = text.rfind(end)
    if at < 0:
        raise RequestError(
            "the chat template does not write the last message, so it cannot be continued",
            param="continue_final_message",
        )
    # A template that strips messages drops the space after the marker.
    return text[:at] if text[at + 1 : at + 2] == " " else text[:at].rstrip()


def _part_texts(parts: Sequence[object]) -> list[str]:
    """The texts of a list of parts, for a template that reads one string."""
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                f"this model's chat template takes text only, not a part of type "
                f"{printable(str(kind))!r}",
                param="messages",
            )
        texts.append(text)
    return texts


def _call(arguments: object, content: str | None) -> Message:
    function = {"name": "PROBE_CALL", "arguments": arguments}
    call = {"id": "call_0", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _with_argument_object(call: object) -> object:
    """The tool call with parsed arguments, if they are the JSON text of an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(parsed, dict):
        return call
    return {**cast(Message, call), "function": {**cast(Message, function), "arguments": parsed}}


def _model_error(error: BaseException) -> ModelError:
    return ModelError(
        f"the chat template is refused: {printable(str(error) or type(error).__name__)}",
        "take the template from the model's publisher, or give one with --chat-template",
    )
