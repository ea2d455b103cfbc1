"""EncodeProcesses: an encoder that tokenizes in worker processes (encode_worker.py).

Each worker loads the tokenizer itself and encodes one task at a time.

A task is a uint64 length, float64 seconds of processor time, and a body in msgpack: the kind, and a
list of texts. The answer is a uint64 length and msgpack: a list of int32 arrays, or an error text.
Everything is little-endian.
"""

import struct
from array import array
from collections.abc import Sequence
from queue import LifoQueue

import msgspec

from banyan.base.child_process import WorkerProcess
from banyan.base.errors import ModelError, RequestError
from banyan.base.log import logger, printable
from banyan.tokenizer.encode import EncodeKind, not_unicode

log = logger(__name__)

TASK = struct.Struct("<Qd")
TIME_S = 120.0
"""CPU seconds for one task: more than the longest body needs."""
_MAX_ANSWER_BYTES = 1 << 30
_MODULE = "banyan.tokenizer.encode_worker"

Task = tuple[EncodeKind, list[str]]
Answer = list[bytes] | str


class EncodeProcesses:
    """A pool of worker processes. A worker that dies is replaced; the task it had fails.

    Args:
        path, is_slow: the tokenizer, as for load_tokenizer.

    Raises:
        ModelError: the workers cannot load it.
    """

    def __init__(self, path: str, number: int, is_slow: bool = False) -> None:
        self._path = path
        self._is_slow = is_slow
        self._idle: LifoQueue[WorkerProcess] = LifoQueue()
        self._children: list[WorkerProcess] = []
        self._is_closed = False
        started = [self._start() for _ in range(number)]
        for child in started:
            try:
                self._ask(child, (EncodeKind.PARSED, []))
            except (EOFError, ValueError):
                self.close()
                raise ModelError(
                    f"a tokenizer process ended while it loaded {printable(path)!r}",
                    "see the lines above, or start with --tokenizer-worker-num 1",
                ) from None
            self._idle.put(child)

    def ids(self, texts: Sequence[str], kind: EncodeKind) -> list[list[int]]:
        child = self._idle.get()
        try:
            if child.has_ended():
                child = self._replace(child)
            answer = self._ask(child, (kind, list(texts)))
        except (EOFError, ValueError):
            child = self._replace(child)
            raise RequestError(
                "the tokenizer process of this request has ended",
                status=500,
                code="tokenizer_failure",
            ) from None
        finally:
            self._idle.put(child)
        if isinstance(answer, str):
            raise RequestError(answer)
        return [array("i", ids).tolist() for ids in answer]

    def close(self) -> None:
        self._is_closed = True
        for child in list(self._children):
            child.close()

    def _replace(self, child: WorkerProcess) -> WorkerProcess:
        if self._is_closed:
            return child
        log.warning("a tokenizer process has ended and is replaced")
        child.close()
        self._children.remove(child)
        return self._start()

    def _start(self) -> WorkerProcess:
        arguments = (self._path, *(["slow"] if self._is_slow else []))
        child = WorkerProcess(_MODULE, *arguments, max_answer_bytes=_MAX_ANSWER_BYTES)
        self._children.append(child)
        return child

    def _ask(self, child: WorkerProcess, task: Task) -> Answer:
        try:
            body = msgspec.msgpack.encode(task)
        except UnicodeError:
            raise not_unicode() from None
        answer = child.run(TASK.pack(len(body), TIME_S) + body)
        return msgspec.msgpack.decode(answer, type=Answer)
