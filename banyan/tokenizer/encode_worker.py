"""The process that tokenizes: reads the tokenizer that it is told, then answers one task at a time.

Nothing but texts and ids passes; what takes longer than a task may ends with the process. Frames
are described in encode_processes.
"""

import os
import signal
import sys
from array import array
from typing import BinaryIO

import msgspec

from banyan.base.errors import RequestError
from banyan.base.heap import give_back
from banyan.base.worker_process import LENGTH
from banyan.tokenizer.encode import Encoder, Kind
from banyan.tokenizer.encode_processes import TASK, Answer, Task
from banyan.tokenizer.load import load_tokenizer

LARGE_BYTES = 1 << 20
"""Tasks above this leave many times their size to the allocator."""


def answer_to(encoder: Encoder, body: bytes) -> Answer:
    """One text after the other: there are as many of these processes as shall work at a time."""
    kind, texts = msgspec.msgpack.decode(body, type=Task)
    calls = [texts] if kind is Kind.PAIR else [[text] for text in texts]
    try:
        return [array("i", ids).tobytes() for call in calls for ids in encoder.ids(call, kind)]
    except RequestError as error:
        return error.text


def _serve(encoder: Encoder, body: bytes, time_s: float, answers: BinaryIO) -> None:
    """One task and its answer, of which nothing stays."""
    signal.setitimer(signal.ITIMER_PROF, time_s)  # its signal ends the process
    answer = msgspec.msgpack.encode(answer_to(encoder, body))
    signal.setitimer(signal.ITIMER_PROF, 0)
    answers.write(LENGTH.pack(len(answer)))
    answers.write(answer)
    answers.flush()


def main() -> None:
    """Serve tasks from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    encoder = load_tokenizer(sys.argv[1]).encoder
    give_back()  # reading a vocabulary takes several times what it keeps
    while len(head := tasks.read(TASK.size)) == TASK.size:
        length, time_s = TASK.unpack(head)
        _serve(encoder, tasks.read(length), time_s, answers)
        if length > LARGE_BYTES:
            give_back()


if __name__ == "__main__":
    main()
