"""Streams of a server under load, and how they end."""

import json
import threading

import httpx

from tests.system.serving import CALL_S, Server, stream_events

STREAMS = 8
CONTEXT = 200_000
LONG = {"temperature": 0, "max_new_tokens": CONTEXT - 100, "ignore_eos": True}
"""An answer that nobody waits for: the tiny model gives thousands of tokens a second."""

ENDLESS = (
    *("--json-model-override-args", json.dumps({"max_position_embeddings": CONTEXT})),
    *("--max-total-tokens", str(STREAMS * CONTEXT), "--incremental-streaming-output"),
)
"""Flags of a server that has room for as many."""


class Stream:
    """One native stream that a thread reads to its end."""

    def __init__(self, server: Server, sampling: dict, prompt: list[int]) -> None:
        self.events: list[dict] = []
        self.started = threading.Event()
        self.failure: Exception | None = None
        self._arguments = (server.url, sampling, prompt)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        url, sampling, prompt = self._arguments
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        try:
            with httpx.stream(
                "POST", f"{url}/generate", json=body, timeout=CALL_S, verify=False
            ) as answer:
                assert answer.status_code == 200, answer.read()
                for event in stream_events(answer):
                    self.events.append(event)
                    self.started.set()
        except Exception as error:  # shown by the test that looks at the stream
            self.failure = error
        finally:
            self.started.set()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def end(self, timeout_s: float) -> list[dict]:
        """All events; fails when the stream hangs or breaks."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the stream hangs after {len(self.events)} events"
        assert self.failure is None, f"the stream broke: {self.failure!r}"
        return self.events


def load(server: Server, count: int = STREAMS, **sampling: object) -> list[Stream]:
    """Streams that all have begun to answer."""
    streams = [Stream(server, LONG | sampling, [5 + i, 6, 7]) for i in range(count)]
    for stream in streams:
        assert stream.started.wait(CALL_S)
        assert stream.failure is None, stream.failure
    return streams


def is_error(event: dict) -> bool:
    return "error" in event


def ends_in_one_error(events: list[dict]) -> bool:
    return is_error(events[-1]) and not any(is_error(e) for e in events[:-1])


def finished(events: list[dict]) -> list[str]:
    return [r["type"] for e in events if (r := e["meta_info"]["finish_reason"]) is not None]
