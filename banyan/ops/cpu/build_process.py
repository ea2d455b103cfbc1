"""The process that compiles the kernels. Each compiler has a process group, with its children.

`build` starts it and keeps its standard input open. When that closes, for any reason, the compilers
are stopped and their output is deleted. Progress is always logged, because a person is waiting.
Standard output is "", or the reason why there is no library, in one line. A `WorkerProcess` does
not fit: it is killed alone, and its compilers would run on.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from banyan.base.log import logger, start_logging
from banyan.base.os import num_cores
from banyan.ops.cpu.build import (
    ISAS,
    LIBRARY,
    OFTEN_RUN,
    OPTIONS_BY_ISA,
    SELDOM_RUN,
    STAND_INS,
    Compiler,
    Source,
    all_sources,
)

_TIMEOUT_S = 600
_LOG_INTERVAL_S = 3.0
"""Shortest time between two progress lines."""
_LOOPS_S = {"attention": 3.0, "linear": 3.0, "pack": 1.5}
_FILE_S = 0.3
"""CPU seconds to compile a file (g++ 12): files with the loops of an instruction set, by op family,
and any other file."""
_SELDOM = 0.5
"""Factor for files compiled with little optimisation."""
_POLL_S = 0.1
_WORK = "compiling-"

_log = logger("banyan.ops.cpu.build")


@dataclass(frozen=True)
class BuildJob:
    """Arguments of this process: what to build.

    Attributes:
        target: path of the library; the lock and temporary files are in the same folder.
        isa: which of ISAS to build for.
        compilers: command lines, tried in order.
    """

    target: str
    isa: str
    compilers: tuple[tuple[str, ...], ...]


def sources_for(isa: str) -> list[Source]:
    """Sources of a library for an instruction set, the longest to compile first.

    These are the best kernels of each family, their stand-ins (STAND_INS), plain code, and code
    that needs no instruction set.
    """
    by_name = {source.name: source for source in all_sources()}
    best: dict[str, str] = {}
    for level in ISAS[: ISAS.index(isa) + 1]:
        best |= {each.family: name for name, each in by_name.items() if each.isa == level}
    seldom = {STAND_INS[name] for name in best.values() if name in STAND_INS}
    seldom |= {f"{family}_{ISAS[0]}" for family in best} & by_name.keys() - {*best.values()}
    often = {*best.values(), *(name for name, each in by_name.items() if not each.isa)}
    found = [
        replace(by_name[name], is_seldom_run=name in seldom) for name in sorted(often | seldom)
    ]
    return sorted(found, key=lambda source: -_expected_s(source))


def _options(source: Source) -> tuple[str, ...]:
    how = SELDOM_RUN if source.is_seldom_run else OFTEN_RUN
    return (how, *OPTIONS_BY_ISA.get(source.isa, ()))


def _expected_s(source: Source) -> float:
    seconds = _LOOPS_S.get(source.family, _FILE_S) if source.isa else _FILE_S
    return seconds * (_SELDOM if source.is_seldom_run else 1)


def definitions_for(isa: str) -> tuple[str, ...]:
    """Macros for the kernel tables in the library: BN_LINEAR_VNNI … (csrc/runtime.h)."""
    held = [source.name.upper() for source in sources_for(isa) if source.isa]
    return (f"-DBN_BUILT_FOR={ISAS.index(isa)}", *(f"-DBN_{name}" for name in held))


class _Commands:
    """Runs compilers until `stop` is called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self.is_stopped = False

    def run(self, words: tuple[str, ...], work: Path) -> str:
        """Run one command. Returns "", or in one line why it failed."""
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
                    process_group=0,  # a compiler starts others, which end with it
                )
                self._running.add(process)
        except OSError as error:
            return str(error)
        with process:
            try:
                _, messages = process.communicate(timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _end(process, signal.SIGKILL)
                return f"no end after {_TIMEOUT_S} s"
            finally:
                with self._lock:
                    self._running.discard(process)
        if process.returncode == 0:
            return ""
        errors = [line for line in messages.splitlines() if "error" in line] or ["no message"]
        return f"exit {process.returncode}: {errors[0].strip()}"

    def stop(self) -> None:
        """End the compilers that run, and start no more."""
        with self._lock:
            self.is_stopped = True
            for process in self._running:
                _end(process, signal.SIGTERM)


def _end(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    """Signal a compiler and everything that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


class _Progress:
    """Logs how many files are done, and the estimated time for the rest."""

    def __init__(self, sources: list[Source]) -> None:
        self._waiting = len(sources)
        self._number = len(sources)
        self._left_s = sum(_expected_s(source) for source in sources)
        self._all_s = self._left_s
        self._began = self._logged_at = time.monotonic()

    def one_more(self, source: Source) -> None:
        self._waiting -= 1
        self._left_s -= _expected_s(source)
        now = time.monotonic()
        if now - self._logged_at < _LOG_INTERVAL_S or not self._waiting:
            return
        self._logged_at = now
        left_s = (now - self._began) * self._left_s / (self._all_s - self._left_s)
        line = "compiling the CPU kernels: %d of %d files, about %.0f s left"
        _log.info(line, self._number - self._waiting, self._number, left_s)


def build(job: BuildJob, commands: _Commands) -> str:
    """Build with the first compiler that works. Returns "", or why none did."""
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
                reason = _compile(compiler, Path(work), target, job.isa, commands)
            if not reason:
                return ""
            reasons.append(f"{compiler.name}: {reason}")
            if commands.is_stopped:
                break
        return "; ".join(reasons)


@contextmanager
def _locked(path: Path, commands: _Commands) -> Iterator[None]:
    """Hold the lock of the folder; waiting for it can be stopped."""
    with open(path, "w") as lock:
        is_logged = False
        while not commands.is_stopped:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_logged:
                    _log.info("waiting for the CPU kernels, which are being compiled")
                is_logged = True
                time.sleep(_POLL_S)
        yield


def _compile(compiler: Compiler, work: Path, target: Path, isa: str, commands: _Commands) -> str:
    """Build with one compiler. Returns "", or why it failed."""
    command = (*compiler.compile(work), *definitions_for(isa))
    sources = sources_for(isa)
    outputs = [work / f"{source.name}.o" for source in sources]
    cores = num_cores()
    expected_s = sum(_expected_s(source) for source in sources) / cores * _slowness(cores)
    line = "compiling the CPU kernels with %s, once: %d files, about %.0f s on %d cores"
    _log.info(line, compiler.name, len(sources), expected_s, cores)
    progress, began = _Progress(sources), time.monotonic()
    with ThreadPoolExecutor(cores) as threads:
        running: dict[Future[str], Source] = {}
        for source, output in zip(sources, outputs, strict=True):
            words = (*command, *_options(source), "-c", *source.words, "-o", str(output))
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


def _slowness(cores: int, loadavg: Path = Path("/proc/loadavg")) -> float:
    """How many times longer work on every core takes next to what the machine does now."""
    try:
        running = int(loadavg.read_text(encoding="ascii").split()[3].partition("/")[0]) - 1
    except (OSError, ValueError, IndexError):
        return 1.0
    return (cores + max(0, running)) / cores


def main() -> None:
    """Carry out the job on the command line, until it is done or standard input ends."""
    given = json.loads(sys.argv[1])
    job = BuildJob(given["target"], given["isa"], tuple(map(tuple, given["compilers"])))
    start_logging("kernels", "info")
    commands = _Commands()

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
