"""The tokenizer worker process: loads a tokenizer, then encodes one task at a time.

A task that exceeds its CPU time ends the process. encode_processes.py describes the frames.
"""

import os
import signal
import sys
from array import array
from typing import BinaryIO

import msgspec

from banyan.base.child_process import LENGTH
from banyan.base.errors import RequestError
from banyan.base.memory import give_back
from banyan.tokenizer.encode import EncodeKind, Encoder
from banyan.tokenizer.encode_processes import TASK, Answer, Task
from banyan.tokenizer.load import load_tokenizer

LARGE_BYTES = 1 << 20
"""Larger tasks leave many times their size in the allocator."""


def answer_to(encoder: Encoder, body: bytes) -> Answer:
    """Encode the texts of a task one by one: parallelism comes from the number of processes."""
    kind, texts = msgspec.msgpack.decode(body, type=Task)
    calls = [texts] if kind is EncodeKind.PAIR else [[text] for text in texts]
    try:
        return [array("i", ids).tobytes() for call in calls for ids in encoder.ids(call, kind)]
    except RequestError as error:
        return error.text


def _serve(encoder: Encoder, body: bytes, time_s: float, answers: BinaryIO) -> None:
    """Encode one task and write the answer."""
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
    encoder = load_tokenizer(sys.argv[1], is_slow=len(sys.argv) > 2).encoder
    give_back()  # loading a vocabulary needs several times the memory that it keeps
    while len(head := tasks.read(TASK.size)) == TASK.size:
        length, time_s = TASK.unpack(head)
        _serve(encoder, tasks.read(length), time_s, answers)
        if length > LARGE_BYTES:
            give_back()


if __name__ == "__main__":
    main()
