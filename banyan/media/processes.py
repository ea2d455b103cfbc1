"""MediaProcesses: decodes pictures in worker processes (worker.py), with time and memory limits.

A task is uint64 length, float64 seconds of processor time, and a `PictureTask` or `SoundTask` in
msgpack. An answer is a uint64 length and msgpack (`DecodedPicture`, `DecodedSound`). All
little-endian.
"""

import asyncio
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from queue import LifoQueue
from typing import TypeVar

import msgspec

from banyan.base.child_process import WorkerProcess
from banyan.base.log import logger

T = TypeVar("T")

log = logger(__name__)

TASK = struct.Struct("<Qd")
TASK_S = 30.0
"""CPU seconds for one picture or sound."""
_MAX_ANSWER_BYTES = 1 << 30
_MODULE = "banyan.media.worker"


class PictureTask(msgspec.Struct, frozen=True, tag=True):
    """A file, and what to do with it.

    `rule` "" = report the size only. `settings` belong to the rule.
    """

    data: bytes
    max_pixels: int
    rule: str = ""
    settings: dict[str, object] = msgspec.field(default_factory=dict[str, object])


class DecodedPicture(msgspec.Struct, frozen=True):
    """`error` != "": the picture is refused. `patches` and `digest` are empty for a size."""

    width: int = 0
    height: int = 0
    digest: bytes = b""
    patches: bytes = b""
    error: str = ""


class SoundTask(msgspec.Struct, frozen=True, tag=True):
    """A file of sound, and what to make of it.

    Attributes:
        bands, window: mel bands, and frames of a window.
        is_whole: every window has `window` frames.
        is_cut: each window becomes a content of its own.
        max_windows: a longer sound is refused.
    """

    data: bytes
    bands: int
    window: int
    is_whole: bool = True
    is_cut: bool = False
    max_windows: int = 1


class SoundPart(msgspec.Struct, frozen=True):
    """One content: float16 [windows, bands, frames].

    Attributes:
        start_s, end_s: its place in the file.
        windows, frames: with sound, or all frames of whole windows.
    """

    digest: bytes
    mel: bytes
    start_s: float
    end_s: float
    windows: int
    frames: int


class DecodedSound(msgspec.Struct, frozen=True):
    """`error` != "": the sound is refused."""

    parts: list[SoundPart] = []
    seconds: float = 0.0
    error: str = ""


class WorkerEnded(Exception):
    """A worker process ended, or was ended, during a task."""


class MediaProcesses:
    """Worker processes; each starts with its first task, and again after it has ended."""

    def __init__(self, number: int) -> None:
        self._threads = ThreadPoolExecutor(number, thread_name_prefix="media")
        self._idle: LifoQueue[WorkerProcess | None] = LifoQueue()
        for _ in range(number):
            self._idle.put(None)
        self._children: list[WorkerProcess] = []

    async def run(self, task: PictureTask | SoundTask, answer: type[T], deadline_s: float) -> T:
        """Raises WorkerEnded, also when the task is not done by the deadline or takes TASK_S."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._run, task, answer, deadline_s)

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, task: PictureTask | SoundTask, kind: type[T], deadline_s: float) -> T:
        frame = bytearray(TASK.size)
        msgspec.msgpack.Encoder().encode_into(task, frame, TASK.size)
        TASK.pack_into(frame, 0, len(frame) - TASK.size, TASK_S)
        child = self._idle.get()
        try:
            if (left_s := deadline_s - time.monotonic()) <= 0:
                raise WorkerEnded
            if child is None:
                child = WorkerProcess(_MODULE, max_answer_bytes=_MAX_ANSWER_BYTES)
                self._children.append(child)
            answer = child.run(frame, left_s)
            return msgspec.msgpack.decode(answer, type=kind)
        except (EOFError, TimeoutError, ValueError) as error:
            log.warning("a media worker has ended during a task (%s)", type(error).__name__)
            if child is not None:
                child.close()
                self._children.remove(child)
            child = None
            raise WorkerEnded from None
        finally:
            self._idle.put(child)
