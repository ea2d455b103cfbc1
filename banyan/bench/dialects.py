"""The APIs of the servers that are benchmarked: request bodies, and parsing of complete responses.

Arrival times come with the pieces of a response.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import orjson

from banyan.base.errors import ConfigError
from banyan.bench.datasets import Prompt
from banyan.bench.http import ExchangeError, HttpResponse

Json = dict[str, object]

_DONE = b"[DONE]"
_SHOWN_ERROR = 300


@dataclass
class Answer:
    """The answer to one request.

    Attributes:
        times: (arrival in perf_counter seconds, tokens so far) of each event that brought tokens.
        is_counted: the token count is the server's; otherwise events were counted.
    """

    started: float
    times: list[tuple[float, int]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    is_counted: bool = False

    def record(self, at: float, so_far: int) -> None:
        """Record that `so_far` tokens have arrived, if that is more than before."""
        if so_far > (self.times[-1][1] if self.times else 0):
            self.times.append((at, so_far))

    @property
    def so_far(self) -> int:
        return self.times[-1][1] if self.times else 0

    def count(self, usage: Mapping[str, object]) -> None:
        """Take over the server's counts."""
        if isinstance(made := usage.get("completion_tokens"), int):
            self.output_tokens, self.is_counted = made, True
        if isinstance(given := usage.get("prompt_tokens"), int):
            self.prompt_tokens = given
        details = usage.get("prompt_tokens_details")
        cached = details if isinstance(details, dict) else usage
        if isinstance(hit := cached.get("cached_tokens"), int):
            self.cached_tokens = hit


@dataclass(frozen=True)
class RequestOptions:
    """Settings of all requests of a run.

    Attributes:
        extra: merged into each body, last.
        send_ids: send prompts as token ids if the API takes them.
    """

    model: str
    stream: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = True
    send_ids: bool = False
    return_logprob: bool = False
    top_logprobs: int = 0
    logprob_start: int = -1
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchAPI:
    """One HTTP API.

    Attributes:
        body: (prompt, wish) -> request body.
        read: takes one event (or the one answer, unstreamed) into an Answer.
        takes_ids: prompts may be lists of token ids.
    """

    route: str
    body: Callable[[Prompt, RequestOptions], Json]
    read: Callable[[Json, float, Answer], None]
    takes_ids: bool


def request_body(dialect: BenchAPI, prompt: Prompt, request_options: RequestOptions) -> bytes:
    return orjson.dumps({**dialect.body(prompt, request_options), **request_options.extra})


def read_reply(dialect: BenchAPI, reply: HttpResponse, stream: bool) -> Answer:
    """The answer in `reply`.

    Raises:
        ExchangeError: an error status, an error event, or a stream without an end.
    """
    answer = Answer(reply.started)
    if reply.status != 200:
        raise ExchangeError(f"HTTP {reply.status}: {_error_text(reply.body)}")
    if not stream:
        at = reply.pieces[-1][0] if reply.pieces else reply.started
        dialect.read(_event(reply.body), at, answer)
        answer.times = []
        return _checked(answer, at)
    is_done, at = False, reply.started
    for at, raw in events(reply.pieces):
        if raw == _DONE:
            is_done = True
            break
        dialect.read(_event(raw), at, answer)
    if not is_done:
        raise ExchangeError("the stream ended without [DONE]")
    return _checked(answer, at)


def _checked(answer: Answer, ended: float) -> Answer:
    """The answer, with a token count and at least one arrival time."""
    if not answer.is_counted:
        answer.output_tokens = max(answer.so_far, bool(answer.text))
    if not answer.times:
        answer.record(ended, answer.output_tokens)
    if not answer.times:
        raise ExchangeError("the answer has no tokens")
    return answer


def events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """(arrival, payload) of each server-sent event; an event arrives with its last piece."""
    rest = b""
    for at, piece in pieces:
        *lines, rest = (rest + piece if rest else piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at, line[5:].strip()


def _event(raw: bytes) -> Json:
    try:
        event = orjson.loads(raw)
    except orjson.JSONDecodeError:
        shown = raw[:_SHOWN_ERROR].decode(errors="replace")
        raise ExchangeError(f"the server sent something that is not JSON: {shown!r}") from None
    if not isinstance(event, dict):
        raise ExchangeError(f"the server sent no JSON object: {str(event)[:_SHOWN_ERROR]}")
    if event.get("error"):
        raise ExchangeError(f"error in the answer: {_error_text(raw)}")
    return event


def _error_text(raw: bytes) -> str:
    try:
        error = orjson.loads(raw)
        while isinstance(error, dict) and isinstance(error.get("error"), dict | str):
            error = error["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (orjson.JSONDecodeError, KeyError):
        text = raw.decode(errors="replace")
    return " ".join(str(text).split())[:_SHOWN_ERROR]


def _native_body(prompt: Prompt, request_options: RequestOptions) -> Json:
    body: Json = {
        "sampling_params": {
            "temperature": request_options.temperature,
            "top_p": request_options.top_p,
            "max_new_tokens": prompt.output_len,
            "ignore_eos": request_options.ignore_eos,
        },
        "stream": request_options.stream,
    }
    if request_options.send_ids and prompt.ids is not None:
        body["input_ids"] = prompt.ids
    else:
        body["text"] = prompt.text
    if request_options.return_logprob or request_options.top_logprobs:
        body |= {
            "return_logprob": True,
            "top_logprobs_num": request_options.top_logprobs,
            "logprob_start_len": request_options.logprob_start,
        }
    return body


def _read_native(event: Json, at: float, answer: Answer) -> None:
    meta = event.get("meta_info")
    if not isinstance(meta, dict):
        raise ExchangeError("an event without meta_info: is this server's /generate native?")
    answer.count(meta)
    answer.record(at, answer.output_tokens if answer.is_counted else answer.so_far + 1)
    text = event.get("text")
    if isinstance(text, str):
        # Events carry the whole text so far, or only the new text with incremental output.
        is_whole = text.startswith("".join(answer.text))
        answer.text = [text] if is_whole else [*answer.text, text]
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise ExchangeError(f"the server gave the request up: {reason.get('message', '')}")


def _openai_body(prompt: Prompt, request_options: RequestOptions) -> Json:
    body: Json = {
        "model": request_options.model,
        "temperature": request_options.temperature,
        "top_p": request_options.top_p,
        "max_tokens": prompt.output_len,
        "stream": request_options.stream,
        "ignore_eos": request_options.ignore_eos,
    }
    if request_options.stream:
        body["stream_options"] = {"include_usage": True}
    return body


def _completions_body(prompt: Prompt, request_options: RequestOptions) -> Json:
    body = _openai_body(prompt, request_options)
    body["prompt"] = (
        prompt.ids if request_options.send_ids and prompt.ids is not None else prompt.text
    )
    if request_options.return_logprob or request_options.top_logprobs:
        body["logprobs"] = request_options.top_logprobs
    return body


def _read_completions(event: Json, at: float, answer: Answer) -> None:
    for choice in _choices(event):
        piece = choice.get("text")
        if isinstance(piece, str) and (piece or not choice.get("finish_reason")):
            answer.text.append(piece)
            answer.record(at, answer.so_far + 1)
    _count_openai(event, at, answer)


def _chat_body(prompt: Prompt, request_options: RequestOptions) -> Json:
    body = _openai_body(prompt, request_options)
    content: object = prompt.text
    if prompt.images:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in prompt.images]
        content = [*parts, {"type": "text", "text": prompt.text}]
    body["messages"] = [{"role": "user", "content": content}]
    if request_options.return_logprob or request_options.top_logprobs:
        body |= {"logprobs": True, "top_logprobs": request_options.top_logprobs}
    return body


def _read_chat(event: Json, at: float, answer: Answer) -> None:
    for choice in _choices(event):
        message = choice.get("delta") or choice.get("message")
        if not isinstance(message, dict):
            continue
        pieces = [message.get("content"), message.get("reasoning_content")]
        texts = [p for p in pieces if isinstance(p, str) and p]
        if texts or message.get("tool_calls"):
            answer.text += texts
            answer.record(at, answer.so_far + 1)
    _count_openai(event, at, answer)


def _choices(event: Json) -> list[Json]:
    choices = event.get("choices")
    return [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []


def _count_openai(event: Json, at: float, answer: Answer) -> None:
    """Read the usage, which is in the last event, or in every event (continuous usage)."""
    usage = event.get("usage")
    if isinstance(usage, dict):
        answer.count(usage)
        if _choices(event) and answer.times and answer.times[-1][0] == at:
            before = answer.times[-2][1] if len(answer.times) > 1 else 0
            answer.times[-1] = (at, max(before + 1, answer.output_tokens))


NATIVE = BenchAPI("/generate", _native_body, _read_native, takes_ids=True)
COMPLETIONS = BenchAPI("/v1/completions", _completions_body, _read_completions, takes_ids=True)
CHAT = BenchAPI("/v1/chat/completions", _chat_body, _read_chat, takes_ids=False)

BACKENDS: dict[str, tuple[BenchAPI, int]] = {
    "banyan": (NATIVE, 30000),
    "sglang": (NATIVE, 30000),
    "sglang-native": (NATIVE, 30000),
    "banyan-oai": (COMPLETIONS, 30000),
    "sglang-oai": (COMPLETIONS, 30000),
    "banyan-oai-chat": (CHAT, 30000),
    "sglang-oai-chat": (CHAT, 30000),
    "vllm": (COMPLETIONS, 8000),
    "vllm-chat": (CHAT, 8000),
    "lmdeploy": (COMPLETIONS, 23333),
    "lmdeploy-chat": (CHAT, 23333),
    "openai": (COMPLETIONS, 8000),
    "openai-chat": (CHAT, 8000),
}
"""Backend name -> (dialect, default port)."""


def backend(name: str) -> tuple[BenchAPI, int]:
    if name not in BACKENDS:
        raise ConfigError(
            f"--backend {name!r} is not spoken here", hint=f"choose one of: {', '.join(BACKENDS)}"
        )
    return BACKENDS[name]
