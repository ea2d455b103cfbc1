"""Logs and records of finished requests: --log-requests, request times, record files, crash dumps,
and the latest ones in memory for the console.

The levels of --log-requests-level are SGLang's: 0 = lengths and times, 1 = sampling parameters too,
2 = the beginning of prompt and answer too, 3 = all of them. A crash dump has the requests of the
last minutes.
"""

import asyncio
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import ConfigError, RequestError
from banyan.base.log import BARE, logger
from banyan.config.schema import ObserveConfig
from banyan.engine_client.metrics_observer import MetricsObserver, RequestOutcome
from banyan.requests.generation import Chunks, Finish, Generator, TextChunk, Usage, observed
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

MAX_ENDED = 500
"""Ended requests that are kept for the console."""
KEPT_S = 300.0
"""How far back a dump goes."""
KEPT_TOKENS = 4_000_000
"""Tokens of prompts that are kept for it; the oldest go first."""


def metrics_observers_of(observe: ObserveConfig) -> list[MetricsObserver]:
    """What the flags ask for, besides the figures of Prometheus and the dump.

    Raises:
        ConfigError: there is no folder for records, or none that can be written to.
    """
    found: list[MetricsObserver] = []
    if observe.times:
        found.append(TimesLog(observe.logs_requests_json))
    if observe.writes_records:
        if not observe.records:
            raise ConfigError(
                "--export-metrics-to-file needs a folder", hint="give --export-metrics-to-file-dir"
            )
        found.append(RecordFiles(Path(observe.records)))
    return found


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
            **({"key": request.key_name} if request.key_name else {}),
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
        as_json = self._observe.logs_requests_json
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
        if request.message.spans:
            inside = sum(span.count for span in request.message.spans)
            return f"{len(request.prompt)} tokens, {inside} of them given by content"
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


class Ends:
    """A meter that looks at ends alone."""

    def first_tokens(self, seconds: float) -> None:
        pass

    def next_tokens(self, seconds: float, count: int) -> None:
        pass


class TimesLog(Ends):
    """A line in the log: where a request's time went."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def ended(self, outcome: RequestOutcome) -> None:
        write_line("request times", {"id": outcome.request.id, **times(outcome)}, self._as_json)


class RecordFiles(Ends):
    """A JSON object for each request, in a file of the hour (UTC) in which it ended.

    Args:
        folder: made where it is missing, with the first record.

    Raises:
        ConfigError: nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(
                f"--export-metrics-to-file-dir {folder}: {there} is no folder that can be "
                "written to",
                hint="name another",
            )
        self._folder = folder
        self._is_failing = False

    def ended(self, outcome: RequestOutcome) -> None:
        now = datetime.now(UTC)
        path = self._folder / f"sglang-request-metrics-{now:%Y%m%d_%H}.log"
        line = json.dumps({"time": now.isoformat(timespec="milliseconds"), **record(outcome)})
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            if not self._is_failing:
                log.error("records of requests are lost: %s: %s", path, error.strerror)
            self._is_failing = True
        else:
            self._is_failing = False


class Recent(Ends):
    """The requests of the last minutes, with the ids of their prompts, to be dumped.

    Args:
        folder: of the dumps, readable by this user alone.
    """

    def __init__(
        self, folder: Path, clock: Clock | None = None, kept_tokens: int = KEPT_TOKENS
    ) -> None:
        self._folder = folder
        self._clock = clock or WallClock()
        self._most = kept_tokens
        self._courses: deque[tuple[float, RequestOutcome]] = deque()
        self._tokens = 0

    def ended(self, outcome: RequestOutcome) -> None:
        self._courses.append((self._clock.now(), outcome))
        self._tokens += _size(outcome)
        while self._courses and (
            self._tokens > self._most or self._clock.now() - self._courses[0][0] > KEPT_S
        ):
            self._tokens -= _size(self._courses.popleft()[1])

    def dump(self, why: str) -> Path | None:
        """Write them into a file of their own; None, and a line in the log, when that fails."""
        now_s = self._clock.now()
        moment = datetime.now(UTC)
        path = self._folder / f"banyan-crash-{moment:%Y%m%d_%H%M%S}-{os.getpid()}.jsonl"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(handle, "w", encoding="utf-8") as file:
                json.dump({"time": moment.isoformat(timespec="seconds"), "why": why}, file)
                for ended_s, outcome in list(self._courses):
                    if now_s - ended_s <= KEPT_S:
                        ago = {"ended_s_ago": round(now_s - ended_s, 3)}
                        prompt = list(outcome.request.prompt)
                        file.write("\n")
                        json.dump({**ago, **record(outcome), "prompt_ids": prompt}, file)
                file.write("\n")
        except OSError as error:
            log.error("no dump of the last requests: %s: %s", path, error.strerror)
            return None
        log.error("the requests of the last %g s are in %s", KEPT_S, path)
        return path


def dump_recordings(folder: Path, recordings: Mapping[int, bytes]) -> list[Path]:
    """Write what the flight recorders of some engines held into files for `banyan replay`."""
    written: list[Path] = []
    stem = f"banyan-crash-{datetime.now(UTC):%Y%m%d_%H%M%S}-{os.getpid()}"
    for replica, content in recordings.items():
        if not content:
            continue
        path = folder / f"{stem}-engine{replica}.journal"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(handle, "wb") as file:
                file.write(content)
        except OSError as error:
            log.error("no dump of the flight recorder: %s: %s", path, error.strerror)
            continue
        log.error("what engine %d has decided is in %s", replica, path)
        written.append(path)
    return written


def times(outcome: RequestOutcome) -> dict[str, object]:
    """Seconds in the queue, until the first token from then on, after it, and of all of it."""
    queue_s = outcome.usage.queue_s if outcome.usage else 0.0
    first_s, seconds = outcome.first_s, outcome.seconds
    return {
        "queue_s": round(queue_s, 4),
        "prefill_s": None if first_s is None else round(max(0.0, first_s - queue_s), 4),
        "decode_s": None if first_s is None else round(seconds - first_s, 4),
        "seconds": round(seconds, 4),
    }


def record(outcome: RequestOutcome) -> dict[str, object]:
    """What became of a request, without its texts."""
    request, usage = outcome.request, outcome.usage
    return {
        "id": request.id,
        "route": request.route,
        **({"key": request.key_name} if request.key_name else {}),
        "reason": outcome.reason,
        "prompt_tokens": len(request.prompt),
        "cached_tokens": usage.cached_tokens if usage else 0,
        "completion_tokens": usage.output_tokens if usage else 0,
        "num_retractions": usage.retractions if usage else 0,
        **times(outcome),
        "sampling_params": msgspec.to_builtins(request.sampling),
    }


def _size(outcome: RequestOutcome) -> int:
    return len(outcome.request.prompt) + 64


class EndedRequests(Ends):
    """The latest ended requests, with the times of their phases but no text. Implements
    MetricsObserver.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[bytes, dict[str, object]]] = deque(maxlen=MAX_ENDED)

    def ended(self, outcome: RequestOutcome) -> None:
        request, usage = outcome.request, outcome.usage
        row: dict[str, object] = {
            "rid": request.id,
            "route": request.route,
            "key": request.key_name,
            "ended": round(time.time(), 3),
            "reason": outcome.reason,
            "prompt_tokens": usage.prompt_tokens if usage else len(request.prompt),
            "cached_tokens": usage.cached_tokens if usage else 0,
            "output_tokens": usage.output_tokens if usage else 0,
            "retractions": usage.retractions if usage else 0,
            **times(outcome),
        }
        self._ended.append((request.message.caller, row))

    def rows(self, caller: bytes | None) -> list[dict[str, object]]:
        """The requests of a caller, newest first; None = of all."""
        return [row for owner, row in reversed(self._ended) if caller in (None, owner)]
