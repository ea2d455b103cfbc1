"""EncodeProcesses: an Encoder that tokenizes in processes of its own (encode_worker), as many texts
at a time as there are of them. Each has read the tokenizer itself.

A task is uint64 length, float64 seconds of processor time, and a body in msgpack: the kind, and a
list of texts. The answer is uint64 length and msgpack: a list of int32 arrays, or a text that says
why there is none. All little-endian.
"""

import struct
from array import array
from collections.abc import Sequence
from queue import LifoQueue

import msgspec

from banyan.base.errors import ModelError, RequestError
from banyan.base.log import logger, printable
from banyan.base.worker_process import Child
from banyan.tokenizer.encode import Kind, not_unicode

log = logger(__name__)

TASK = struct.Struct("<Qd")
TIME_S = 120.0
"""Processor time of one task: more than the longest body takes."""
_MAX_ANSWER_BYTES = 1 << 30
_MODULE = "banyan.tokenizer.encode_worker"

Task = tuple[Kind, list[str]]
Answer = list[bytes] | str


class EncodeProcesses:
    """A process that ends is replaced, and fails the texts that it had if any.

    Args:
        path: the tokenizer, as of load_tokenizer.

    Raises:
        ModelError: they cannot read it.
    """

    def __init__(self, path: str, number: int) -> None:
        self._path = path
        self._idle: LifoQueue[Child] = LifoQueue()
        self._children: list[Child] = []
        self._is_closed = False
        started = [self._start() for _ in range(number)]
        for child in started:
            try:
                self._ask(child, (Kind.PARSED, []))
            except (EOFError, ValueError):
                self.close()
                raise ModelError(
                    f"a process that tokenizes ended while it read {printable(path)!r}",
                    "see the lines above, or start with --tokenizer-worker-num 1",
                ) from None
            self._idle.put(child)

    def ids(self, texts: Sequence[str], kind: Kind) -> list[list[int]]:
        child = self._idle.get()
        try:
            if child.has_ended():
                child = self._replace(child)
            answer = self._ask(child, (kind, list(texts)))
        except (EOFError, ValueError):
            child = self._replace(child)
            raise RequestError(
                "the process that tokenized the request has ended",
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
            child.end()

    def _replace(self, child: Child) -> Child:
        if self._is_closed:
            return child
        log.warning("a process that tokenizes has ended and is replaced")
        child.end()
        self._children.remove(child)
        return self._start()

    def _start(self) -> Child:
        child = Child(_MODULE, self._path, most_bytes=_MAX_ANSWER_BYTES)
        self._children.append(child)
        return child

    def _ask(self, child: Child, task: Task) -> Answer:
        try:
            body = msgspec.msgpack.encode(task)
        except UnicodeError:
            raise not_unicode() from None
        answer = child.ask(TASK.pack(len(body), TIME_S) + body)
        return msgspec.msgpack.decode(answer, type=Answer)
