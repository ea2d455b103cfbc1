"""The compiler process: takes constraints one at a time, answers with their compiled form. It may
be killed at any moment, and the kernel bounds its memory, so nothing that a request brings can
slow or break the engine.

Frames both ways: uint64 little-endian length, msgpack. First comes a Setup, then Jobs.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from banyan.base.child_process import LENGTH
from banyan.base.log import printable
from banyan.base.memory import address_space_bytes, bound_address_space
from banyan.base.os import anonymous_memory, die_with_parent
from banyan.grammar.base import BACKENDS, Backend
from banyan.grammar.vocabulary import Vocabulary, longest_first
from banyan.messages.requests import Constraint

_WARNING = "Warning: "
_NO_MEMORY = "std::bad_alloc"
"""How a C++ library says so."""

T = TypeVar("T")


class Setup(msgspec.Struct, frozen=True):
    backend: str
    vocabulary: Vocabulary
    whitespace: str | None
    memory_bytes: int
    """What compiling may take on top of the library and the vocabulary."""


class Job(msgspec.Struct, frozen=True):
    grammar: str
    """`Generate.grammar`."""


class CompileOutcome(msgspec.Struct, frozen=True):
    """`error` says why there is no compiled form; "" when there is."""

    compiled: bytes = b""
    error: str = ""


def encode_frame(message: Setup | Job | CompileOutcome) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


MAX_FRAME_BYTES = 512 << 20


def read_frame(read: Callable[[int], bytes], kind: type[T]) -> T | None:
    """The next message; None at the end of the stream.

    Raises:
        ValueError: it is longer than MAX_FRAME_BYTES, or no such message.
    """
    head = read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length:,} bytes; {MAX_FRAME_BYTES:,} are legal")
    body = read(length)
    return msgspec.msgpack.decode(body, type=kind) if len(body) == length else None


def compile_one(backend: Backend, grammar: str, warnings: "Warnings") -> CompileOutcome:
    """Compile; whatever the library throws or warns of is the outcome's error."""
    try:
        with warnings:
            compiled = backend.compile(Constraint.decode(grammar))
    except MemoryError:
        return CompileOutcome(error="it needs too much memory")
    except Exception as error:  # the libraries have no common error, and Rust panics are none
        if _NO_MEMORY in str(error):
            return CompileOutcome(error="it needs too much memory")
        return CompileOutcome(error=_reason(str(error) or type(error).__name__))
    if warnings.text:
        return CompileOutcome(error=_reason(warnings.text))
    return CompileOutcome(compiled=compiled)


class Warnings:
    """Catches what a native library writes to standard error about a constraint it takes."""

    def __init__(self) -> None:
        self.text = ""
        self._file = anonymous_memory("warnings")
        self._kept = os.dup(2)

    def __enter__(self) -> None:
        self.text = ""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        os.dup2(self._file, 2)

    def __exit__(self, *failure: object) -> None:
        os.dup2(self._kept, 2)
        os.lseek(self._file, 0, os.SEEK_SET)
        written = os.read(self._file, 1 << 16).decode("utf-8", "replace")
        at = written.find(_WARNING)
        self.text = written[at + len(_WARNING) :].partition("\n")[0] if at >= 0 else ""


def _reason(text: str) -> str:
    """One line for people: without the place in the library's source that some put before it."""
    line = " ".join(text.split())
    _, found, rest = line.partition(".cc:")
    return printable(rest.partition(": ")[2] if found else line, 400)


def main() -> None:
    """Serve jobs from standard input until it ends."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the frames
    read = sys.stdin.buffer.read
    setup = read_frame(read, Setup)
    if setup is None:
        return
    vocabulary = setup.vocabulary
    backend = BACKENDS.load(setup.backend)(vocabulary, longest_first(vocabulary), setup.whitespace)
    warnings = Warnings()
    bound_address_space(address_space_bytes() + setup.memory_bytes)
    while (job := read_frame(read, Job)) is not None:
        answers.write(encode_frame(compile_one(backend, job.grammar, warnings)))
        answers.flush()


if __name__ == "__main__":
    main()
