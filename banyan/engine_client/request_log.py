"""RequestLog: one log line when a request ends (--log-requests), with a level of detail.

The levels are SGLang's: 0 = lengths and times, 1 = sampling parameters too, 2 = the beginning of
prompt and answer too, 3 = all of them.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import msgspec

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import RequestError
from banyan.base.log import BARE, logger
from banyan.config.schema import ObserveConfig
from banyan.requests.chunks import Chunks
from banyan.requests.generation import Finish, Generator, TextChunk, Usage, observed
from banyan.requests.request_spec import RequestSpec

log = logger(__name__)

WITH_SAMPLING, WITH_BEGINNINGS, WITH_ALL = 1, 2, 3

TextOf = Callable[[Sequence[int]], str]

_PLAIN = re.compile(r"[A-Za-z0-9_.:/@+-]{1,256}")
"""Words that a line shows without quotes."""
BEGINNING = 2048
"""Characters of a prompt and of an answer in a line of level 2."""
_BEGINNING_TOKENS = 1024
_QUICK_TOKENS = 8192
"""A longer prompt is made text in a thread."""


class RequestLog:
    """Implements Generator on another, whose every end it logs.

    Args:
        observe: level and format of the lines.
        text_of: text of token ids; None = lines show prompts as ids.
    """

    def __init__(
        self,
        generator: Generator,
        observe: ObserveConfig,
        text_of: TextOf | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.inner = generator
        """What answers when nothing is to be logged."""
        self.text_of = text_of
        self._clock = clock or WallClock()
        self._observe = observe

    def generate(self, request: RequestSpec) -> Chunks[TextChunk]:
        usage = Usage(len(request.prompt), 0)
        outcome = _Course(self._clock, self._most_text, partial(self._log, request), usage)
        return observed(outcome, lambda: self.inner.generate(request))

    def check(self, requests: Sequence[RequestSpec]) -> None:
        self.inner.check(requests)

    @property
    def _most_text(self) -> int:
        """Characters of an answer that are kept for its line; -1 = all."""
        if self._observe.log_detail >= WITH_ALL:
            return -1
        return BEGINNING if self._observe.log_detail >= WITH_BEGINNINGS else 0

    def _log(self, request: RequestSpec, outcome: "_Course", now: float) -> None:
        facts: dict[str, object] = {
            "id": request.id,
            "route": request.route,
            "prompt_tokens": outcome.usage.prompt_tokens,
            "cached_tokens": outcome.usage.cached_tokens,
            "output_tokens": outcome.usage.output_tokens,
            "reason": outcome.reason,
            "seconds": round(now - outcome.began_s, 3),
            "ttft": outcome.ttft(),
            "tokens_per_s": outcome.speed(),
        }
        if self._observe.log_detail >= WITH_SAMPLING:
            facts["sampling"] = msgspec.to_builtins(request.sampling)
        as_json = self._observe.log_format == "json"
        if self._observe.log_detail < WITH_BEGINNINGS:
            write_line("request ended", facts, as_json)
            return

        def write() -> None:
            facts["prompt"] = self._prompt(request)
            facts["output"] = "".join(outcome.text)
            write_line("request ended", facts, as_json)

        if self._observe.log_detail >= WITH_ALL and len(request.prompt) > _QUICK_TOKENS:
            asyncio.get_running_loop().run_in_executor(None, write)
        else:
            write()

    def _prompt(self, request: RequestSpec) -> object:
        """As text, or as ids where there is none."""
        if request.message.embeds:
            return f"{len(request.prompt)} embeddings"
        is_whole = self._observe.log_detail >= WITH_ALL
        ids = request.prompt if is_whole else request.prompt[:_BEGINNING_TOKENS]
        if self.text_of is None:
            return list(ids)
        text = self.text_of(ids)
        return text if is_whole else text[:BEGINNING]


@dataclass
class _Course:
    """What one request has come to so far."""

    clock: Clock
    most_text: int
    """Characters of an answer that are kept for its line; -1 = all."""
    log_end: Callable[["_Course", float], None]
    usage: Usage
    began_s: float = field(init=False)
    reason: str = "closed"
    text: list[str] = field(default_factory=list)
    _length: int = 0
    """Characters in `text`."""
    _first: tuple[float, int] | None = None
    """When the first tokens came, and how many."""
    _last_s: float = 0.0

    def __post_init__(self) -> None:
        self.began_s = self.clock.now()

    def take(self, chunk: TextChunk) -> None:
        now, most_text = self.clock.now(), self.most_text
        self.usage = chunk.usage
        if chunk.finish is not None:
            self.reason = _reason(chunk.finish)
        if chunk.tokens:
            self._first = self._first or (now, chunk.usage.output_tokens)
            self._last_s = now
        kept = chunk.text if most_text < 0 else chunk.text[: most_text - self._length]
        if kept and (most_text < 0 or self._length < most_text):
            self.text.append(kept)
            self._length += len(kept)

    def refuse(self, error: RequestError) -> None:
        self.reason = error.code

    def end(self) -> None:
        self.log_end(self, self.clock.now())

    def ttft(self) -> float | None:
        """Seconds to the first token; None before it."""
        return None if self._first is None else round(self._first[0] - self.began_s, 3)

    def speed(self) -> float | None:
        """Tokens per second after the first; None where none came after it."""
        if self._first is None or self._last_s <= self._first[0]:
            return None
        after = self.usage.output_tokens - self._first[1]
        return round(after / (self._last_s - self._first[0]), 2)


def write_line(event: str, facts: Mapping[str, object], as_json: bool) -> None:
    """Write one line of the request log: key=value words, or one JSON object."""
    if as_json:
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        log.info("%s", json.dumps({"time": moment, "event": event, **facts}), extra=BARE)
        return
    words = (f"{name}={_word(value)}" for name, value in facts.items() if value is not None)
    log.info("%s %s", event, " ".join(words))


def _word(value: object) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    return json.dumps(value)


def _reason(finish: Finish) -> str:
    """Why the request ended: the code of a failure, else stop, length or abort."""
    return finish.code if finish.status else finish.reason
