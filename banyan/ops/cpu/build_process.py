"""The process that compiles the kernels, in a process group with its compilers.

`build` starts it and keeps its standard input open: the end of that, however it comes, ends the
compilers, and what they have written goes. Progress is logged whatever level is shown: a person
waits. Standard output says "" or, in one line, why there is no library.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from banyan.base.log import logger, start_logging
from banyan.ops.cpu.build import ISAS, LIBRARY, OPTIONS_BY_ISA, SOURCES, Compiler

_TIMEOUT_S = 600
_TELL_S = 3.0
"""Least time between two lines of progress."""
_LOOPS_S = {"attention": 3.5, "linear": 4.0}
_FILE_S = 0.4
"""Processor time of a file (g++ 13): of those that hold an instruction set's loops, by op family,
and of any other."""
_POLL_S = 0.1
_WORK = "compiling-"

_log = logger("banyan.ops.cpu.build")


@dataclass(frozen=True)
class Job:
    """What to build: arguments of this process.

    Attributes:
        target: path of the library; beside it lie the lock and the work.
        highest: highest of ISAS to compile.
        compilers: command lines, tried in order.
    """

    target: str
    highest: str
    compilers: tuple[tuple[str, ...], ...]


class _Commands:
    """Runs compilers until told to stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_stopped = False

    def run(self, words: tuple[str, ...], work: Path) -> str:
        """One command; "" or why it failed, in one line."""
        try:
            with self._lock:  # begun before the stop, and then it gets the signal, or not at all
                if self.is_stopped:
                    return "stopped"
                process = subprocess.Popen(
                    ("env", f"TMPDIR={work}", *words),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            with process:
                try:
                    _, told = process.communicate(timeout=_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    return f"no end after {_TIMEOUT_S} s"
        except OSError as error:
            return str(error)
        if process.returncode == 0:
            return ""
        errors = [line for line in told.splitlines() if "error" in line] or ["no message"]
        return f"exit {process.returncode}: {errors[0].strip()}"

    def stop(self) -> None:
        """End every process of this group but this one, which has a handler."""
        with self._lock:
            self.is_stopped = True
            os.killpg(os.getpgrp(), signal.SIGTERM)


class _Progress:
    """Says how many files are done, and how long the others will take at the rate so far."""

    def __init__(self, sources: list[Path]) -> None:
        self._waiting = len(sources)
        self._number = len(sources)
        self._left_s = sum(map(_expected_s, sources))
        self._all_s = self._left_s
        self._began = self._told = time.monotonic()

    def one_more(self, source: Path) -> None:
        self._waiting -= 1
        self._left_s -= _expected_s(source)
        now = time.monotonic()
        if now - self._told < _TELL_S or not self._waiting:
            return
        self._told = now
        left_s = (now - self._began) * self._left_s / (self._all_s - self._left_s)
        told = "compiling the CPU kernels: %d of %d files, about %.0f s left"
        _log.info(told, self._number - self._waiting, self._number, left_s)


def build(job: Job, commands: _Commands) -> str:
    """Build with the first compiler that can; "" or why none did."""
    target = Path(job.target)
    with _locked(target.parent / "lock", commands):
        if target.is_file():
            return ""
        if commands.is_stopped:
            return "stopped"
        for left in target.parent.glob(f"{_WORK}*"):  # of one that was killed
            shutil.rmtree(left, ignore_errors=True)
        reasons = []
        for words in job.compilers:
            compiler = Compiler(words)
            with tempfile.TemporaryDirectory(prefix=_WORK, dir=target.parent) as work:
                reason = _compile(compiler, Path(work), target, job.highest, commands)
            if not reason:
                return ""
            reasons.append(f"{compiler.name}: {reason}")
            if commands.is_stopped:
                break
        return "; ".join(reasons)


@contextmanager
def _locked(path: Path, commands: _Commands) -> Iterator[None]:
    """Hold the lock of the folder, or be stopped while another process has it."""
    with open(path, "w") as lock:
        is_told = False
        while not commands.is_stopped:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_told:
                    _log.info("waiting for the CPU kernels, which another process compiles")
                is_told = True
                time.sleep(_POLL_S)
        yield


def _compile(
    compiler: Compiler, work: Path, target: Path, highest: str, commands: _Commands
) -> str:
    """Build with one compiler; "" or why that failed."""
    level = ISAS.index(highest)
    command = (*compiler.compile(work), f"-DBN_HIGHEST={level}")
    sources = [s for s in SOURCES.glob("*.cpp") if _isa(s) not in ISAS[level + 1 :]]
    sources.sort(key=lambda source: (-_expected_s(source), source.name))  # the longest first
    outputs = [work / f"{source.stem}.o" for source in sources]
    cores = len(os.sched_getaffinity(0))
    expected_s = sum(map(_expected_s, sources)) / cores
    told = "compiling the CPU kernels with %s, once: %d files, about %.0f s on %d cores"
    _log.info(told, compiler.name, len(sources), expected_s, cores)
    progress, began = _Progress(sources), time.monotonic()
    with ThreadPoolExecutor(cores) as threads:
        running: dict[Future[str], Path] = {}
        for source, output in zip(sources, outputs, strict=True):
            options = OPTIONS_BY_ISA.get(_isa(source), ())
            words = (*command, *options, "-c", str(source), "-o", str(output))
            running[threads.submit(commands.run, words, work)] = source
        for done in as_completed(running):
            if reason := done.result():
                threads.shutdown(cancel_futures=True)
                return reason
            progress.one_more(running[done])
    library = work / LIBRARY
    reason = commands.run((*compiler.link(work), *map(str, outputs), "-o", str(library)), work)
    if not reason:
        os.replace(library, target)  # whole or not at all
        _log.info("compiled the CPU kernels in %.1f s", time.monotonic() - began)
    return reason


def _isa(source: Path) -> str:
    return source.stem.rpartition("_")[2]


def _expected_s(source: Path) -> float:
    family = source.stem.rpartition("_")[0]
    return _LOOPS_S.get(family, _FILE_S) if _isa(source) in ISAS else _FILE_S


def main() -> None:
    """Carry out the job on the command line, until it is done or standard input ends."""
    given = json.loads(sys.argv[1])
    job = Job(given["target"], given["highest"], tuple(map(tuple, given["compilers"])))
    start_logging("kernels", "info")
    commands = _Commands()
    signal.signal(signal.SIGTERM, lambda *_: None)  # for the compilers of this group

    def watch() -> None:
        while os.read(0, 1):
            pass
        commands.stop()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    try:
        reason = build(job, commands)
    except OSError as error:
        reason = f"the folder for compiled kernels cannot be used: {error}"
    if not commands.is_stopped:  # else nobody is there to read it
        sys.stdout.write(reason)


if __name__ == "__main__":
    main()
