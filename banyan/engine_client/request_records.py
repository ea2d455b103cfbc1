"""Records of finished requests: a log line with times, a JSON record in a file, and a crash dump
of the last minutes.
"""

import json
import os
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.schema import ObserveConfig
from banyan.engine_client.metrics_observer import MetricsObserver, RequestOutcome
from banyan.engine_client.request_log import write_line

log = logger(__name__)

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
        found.append(TimesLog(observe.log_format == "json"))
    if observe.writes_records:
        if not observe.records:
            raise ConfigError(
                "--export-metrics-to-file needs a folder", hint="give --export-metrics-to-file-dir"
            )
        found.append(RecordFiles(Path(observe.records)))
    return found


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
