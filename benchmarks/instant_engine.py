"""An engine without a model: it knows every token beforehand, so that only the front takes time.

It speaks the engine's side of the link like a real one: one frame per step, with one token of every
open request in it. Steps come at a given pace.
"""

import select
import time
from array import array
from dataclasses import dataclass

from banyan.base.child_process import read_process_spec, watch_parent
from banyan.messages.events import Event, Finished, Ready, Reply, Stats, Tokens
from banyan.messages.requests import Abort, Control, Generate, Message, StopAt
from banyan.messages.transport import SocketEngineLink

FIRST_ID, NUM_IDS = 1000, 1000
"""Tokens of its answers; in the demo model's vocabulary these are words and their parts."""
_HEARTBEAT_S = 0.5
_CATCH_UP_STEPS = 10
"""Steps that come at once after it was held up; what is lost beyond them stays lost."""
_MAX_TOKENS = 1 << 22
_IDS = [array("i", [FIRST_ID + i]).tobytes() for i in range(NUM_IDS)]


@dataclass
class _Open:
    prompt_len: int
    length: int
    said: int = 0


class InstantEngine:
    """Args:
    rate: tokens per second, over all requests.
    """

    def __init__(self, link: SocketEngineLink, rate: float) -> None:
        self._link = link
        self._rate = rate
        self._open: dict[str, _Open] = {}
        self._finished = 0

    def run(self) -> None:
        """Answer until the process is ended."""
        self._link.send([Ready(_MAX_TOKENS, _MAX_TOKENS, 4096)])
        due_s = beat_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s >= beat_s:
                self._link.send([Stats(finished=self._finished, running=len(self._open))])
                beat_s = now_s + _HEARTBEAT_S
            if self._open and now_s >= due_s:
                pause_s = len(self._open) / self._rate
                due_s = max(due_s, now_s - _CATCH_UP_STEPS * pause_s) + pause_s
                self._link.send(self._step())
            next_s = min(beat_s, due_s) if self._open else beat_s
            select.select([self._link.poll_fd()], [], [], max(0.0, next_s - time.monotonic()))
            for message in self._link.receive():
                self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case Generate():
                prompt_len = len(message.tokens) // 4
                self._open[message.request] = _Open(prompt_len, message.sampling.max_new_tokens)
            case Abort() | StopAt():
                if message.request in self._open:
                    self._link.send([self._end(message.request, "abort")])
            case Control():
                self._link.send([Reply(message.call, True)])

    def _step(self) -> list[Event]:
        events: list[Event] = []
        for request, one in list(self._open.items()):
            events.append(Tokens(request, one.said, _IDS[one.said % NUM_IDS]))
            one.said += 1
            if one.said == one.length:
                events.append(self._end(request, "length"))
        return events

    def _end(self, request: str, reason: str) -> Finished:
        one = self._open.pop(request)
        self._finished += 1
        return Finished(request, reason, one.prompt_len, one.said, 0)


def main() -> None:
    address, rate = read_process_spec().decode().split()
    watch_parent()
    InstantEngine(SocketEngineLink(address), float(rate)).run()


if __name__ == "__main__":
    main()
