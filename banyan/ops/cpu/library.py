"""The compiled library: typed calls, threads, and one way to run or record an op.

An op's wrapper allocates its outputs with `empty` and appends itself with `call`. Outside `record`,
the op runs at once; inside, it becomes part of a program that later runs without Python.

A wrapper is a class that takes the Library. Its row in the kernel table:

    rms_norm = Kernel(make=lambda library: Rows(library).rms_norm, supports=...)
"""

import ctypes
import re
import time
import weakref
from collections.abc import Callable, Sequence
from ctypes import Array
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from banyan.base.errors import DeviceError
from banyan.base.log import logger
from banyan.ops.api import (
    IndexShape,
    LatentPrologue,
    MultiStepInputs,
    NotRecordable,
    OpTime,
    Peaks,
    PrologueShape,
)
from banyan.ops.cpu.build import ISAS, SOURCES, BuildError, library_paths

TOKENS, ROWS, OUTPUTS, ALL_TOKENS, ALL_OUTPUTS = range(5)
"""Sizes that change from step to step; numbers as in csrc/runtime.h."""
_ALIGNMENT = 64

Functions = dict[str, Callable[..., Any]]
"""Exported functions by name; result types as in `signatures`."""

_log = logger("banyan.ops.cpu")

_EXPORT = re.compile(r"BN_EXPORT\s+([\w\s*]+?)\s*\b(bn_\w+)\(([^)]*)\)")
_TYPES = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "void": None,
}
_VIEWS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "view",
        "_unsafe_view",
        "alias",
        "lift_fresh",
        "detach",
        "slice",
        "select",
        "split",
        "unsqueeze",
        "split_with_sizes",
        "squeeze",
        "permute",
        "transpose",
        "t",
        "unbind",
        "expand",
        "as_strided",
        "narrow",
        "chunk",
    )
)

Pointer = int
"""An address; 0 = none."""


class Library:
    """One loaded library with its threads; a `Toolkit`.

    Args:
        path: the shared library (`build.cached_library`).
        threads: threads that share the work, including the caller.
        isa: highest instruction set to use; "" = the one that the library is built for.
        cpus: processors to pin the threads to; empty = not pinned.
        quantization: type that packed float weights are rounded to, a name of
            `weights.QUANTIZATIONS`; "" = not rounded.
    """

    def __init__(
        self,
        path: Path,
        threads: int,
        isa: str = "",
        cpus: Sequence[int] | None = None,
        quantization: str = "",
    ) -> None:
        self.quantization = quantization
        self._library = ctypes.CDLL(str(path))
        self._functions: Functions = {}
        for name, (result, arguments) in signatures().items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function
        if isa:
            self._functions["bn_set_isa"](ISAS.index(isa))
        where = (ctypes.c_int32 * threads)(*cpus) if cpus else None
        self._pool = self._functions["bn_pool_new"](threads, where)
        self._scratch = self._functions["bn_program_new"]()
        self._recording: LibraryRecording | None = None
        self._close = weakref.finalize(self, _free, self._functions, self._pool, self._scratch)

    @property
    def absence(self) -> str:
        return ""

    @property
    def recorder(self) -> "Library":
        return self

    def cache_dtype(self, dtype: torch.dtype, exact: bool) -> torch.dtype:
        """Type of the KV cache: half precision if kernels may round activations anyway."""
        return dtype if exact or dtype != torch.float32 else torch.float16

    def joins_index(self, shape: IndexShape) -> bool:
        return False

    def open_prologue(
        self, shape: PrologueShape, dtype: torch.dtype, device: torch.device
    ) -> LatentPrologue | None:
        return None

    @property
    def multiplies_bf16(self) -> bool:
        """Whether there are kernels for bf16 times bf16."""
        return bool(self._functions["bn_multiplies_pairs"]())

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return ISAS[self._functions["bn_isa"]()]

    def problems(self) -> list[str]:
        """Check every kernel family against the plain code; returns the failures."""
        level, why = ISAS.index(self.isa), ctypes.create_string_buffer(200)
        return [
            f"{name.removeprefix('bn_check_')}: {why.value.decode()}"
            for name, check in self._functions.items()
            if level and name.startswith("bn_check_") and check(level, why, len(why))
        ]

    @property
    def threads(self) -> int:
        return self._functions["bn_pool_threads"](self._pool)

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    @property
    def recording(self) -> "LibraryRecording | None":
        """The program that is being recorded, if any."""
        return self._recording

    @property
    def pool(self) -> Pointer:
        """Thread pool, for functions that run their own work on it."""
        return self._pool

    def close(self) -> None:
        """End the threads. Nothing may run or be recorded afterwards."""
        self._close()

    def function(self, name: str) -> Callable[..., Any]:
        """A function of the library that is not an op (packing, checks)."""
        return self._functions[name]

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for an op's output: contiguous, 64-byte aligned while recording."""
        if self._recording is not None:
            return self._recording.empty(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype)

    def call(self, name: str, leading: int, *arguments: int | float, rows: int = 0) -> None:
        """Run, or record, the op `name`: builder(program, size, *arguments).

        Args:
            leading: rows of the op's leading dimension.
            rows: requests in the step, for ops that need the number.
        """
        builder = self._functions[name]
        if self._recording is not None:
            builder(self._recording.program, self._recording.size_of(leading), *arguments)
            return
        builder(self._scratch, TOKENS, *arguments)
        sizes = _sizes(leading, rows, leading)
        _succeed(self._functions["bn_program_run_once"](self._pool, self._scratch, sizes))

    def wake_next(self, wake_fd: int) -> None:
        self._functions["bn_pool_ring_next"](self._pool, wake_fd)

    def _run(self, program: Pointer, *given: int) -> None:
        sizes = _sizes(*given)
        _succeed(self._functions["bn_program_run"](self._pool, program, sizes, None))

    def record(
        self, work: Callable[[], Tensor], tokens: int, outputs: int, replicas: int = 1
    ) -> "LibraryRecording":
        """Record the ops that `work` calls, for any number of tokens and outputs up to these.

        Args:
            work: called once; its result becomes `Recording.result`. Inputs are tensors that stay
                at their addresses. Their leading dimension is `tokens` or `outputs`, which must
                differ, or `replicas` times that for ops on the rows of several replicas.

        Raises:
            NotRecordable: `work` calls torch operations other than ops and views.
        """
        leading = {tokens: TOKENS, outputs: OUTPUTS}
        if replicas > 1:
            leading |= {replicas * tokens: ALL_TOKENS, replicas * outputs: ALL_OUTPUTS}
        if len(leading) < (4 if replicas > 1 else 2):
            raise ValueError("tokens and outputs must differ, because they identify the sizes")
        recording = LibraryRecording(self, self._functions, leading)
        self._recording = recording
        try:
            with _OnlyViews():
                recording.result = work()
        finally:
            self._recording = None
        return recording


class LibraryRecording:
    """A recorded program and its memory. Runs for any sizes up to the recorded ones."""

    result: Tensor
    """Result of the recorded work; a run fills its first rows."""

    def __init__(
        self,
        library: Library,
        functions: Functions,
        sizes: dict[int, int],
    ) -> None:
        self._library = library
        self._functions = functions
        self._sizes = sizes
        self._free: dict[int, list[np.ndarray]] = {}
        self.program = functions["bn_program_new"]()
        weakref.finalize(self, _free_program, functions, library._close, library.pool, self.program)

    def size_of(self, leading: int) -> int:
        if leading not in self._sizes:
            raise NotRecordable(f"an op of {leading} rows, neither tokens nor outputs")
        return self._sizes[leading]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that later ops reuse when the tensor is no longer referenced."""
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        free = self._free.setdefault(size, [])
        block = free.pop() if free else _aligned(size)
        mine = block[:]  # an object of its own: the tensor's storage keeps it alive
        weakref.finalize(mine, free.append, block)
        return torch.from_numpy(mine).view(dtype).view(tuple(shape))

    def run(
        self, tokens: int, rows: int, outputs: int, all_tokens: int = 0, all_outputs: int = 0
    ) -> None:
        """Run the program for the first `tokens` tokens of `rows` requests."""
        self._library._run(self.program, tokens, rows, outputs, all_tokens, all_outputs)

    def multi_step(self, rows: int, inputs: MultiStepInputs) -> int:
        """Run several decode steps for `rows` requests, each with the tokens sampled before.

        Returns the number of steps.
        """
        done, at = np.zeros(1, np.int32), inputs.at
        places = np.array([group.ctypes.data for group in inputs.places], np.int64)
        state = (inputs.sampled, inputs.best, inputs.tokens, inputs.positions)
        more = (inputs.to_positions, inputs.lengths)
        lists = (places, at, inputs.first_stop, inputs.stops, inputs.interrupt)
        failure = self._functions["bn_program_burst"](
            self._library.pool,
            self.program,
            _sizes(rows, rows, rows),
            at.shape[1],
            rows,
            *(array.ctypes.data for array in (*state, *more)),
            len(places),
            *(array.ctypes.data for array in lists),
            inputs.number,
            inputs.steps_done.ctypes.data,
            inputs.report_every,
            inputs.wake_fd,
            inputs.pace_ns,
            done.ctypes.data,
        )
        _succeed(failure)
        return int(done[0])

    def times(
        self, tokens: int, rows: int, outputs: int, all_tokens: int = 0, all_outputs: int = 0
    ) -> list[OpTime]:
        """Run once and return the time and cost of each stage, for reports."""
        get = self._functions
        sizes = _sizes(tokens, rows, outputs, all_tokens, all_outputs)
        seconds = (ctypes.c_double * get["bn_program_stages"](self.program))()
        _succeed(get["bn_program_run"](self._library.pool, self.program, sizes, seconds))
        stages: dict[int, OpTime] = {}
        moved, done = ctypes.c_double(), ctypes.c_double()
        for op in range(get["bn_program_ops"](self.program)):
            stage = get["bn_program_op_cost"](
                self.program, op, sizes, ctypes.addressof(moved), ctypes.addressof(done)
            )
            name = get["bn_program_op_name"](self.program, op).decode()
            so_far = stages.get(stage, OpTime("", seconds[stage], 0.0, 0.0))
            stages[stage] = OpTime(
                f"{so_far.name} + {name}" if so_far.name else name,
                so_far.seconds,
                so_far.bytes + moved.value,
                so_far.operations + done.value,
            )
        return list(stages.values())


def open_library(isa: str, threads: int, compiler: str, quantization: str) -> Library:
    """Open the library for an instruction set: from the package, else built on this machine.

    Falls back to a lower set if neither passes its checks, or if the system lacks the registers.

    Args:
        compiler: a command line to try before other compilers; the package's library is then not
            used. "" = none.

    Raises:
        BuildError: the package has no working library, and none can be built.
    """
    while True:
        for path in library_paths(isa, compiler):
            try:
                library = Library(path, threads, quantization=quantization)
            except (OSError, AttributeError) as error:  # of another system, or damaged
                _log.warning("%s cannot be loaded: %s", path, error)
                continue
            problems = library.problems()
            if library.isa == isa and not problems:
                return library
            for problem in problems or ["the system does not give its registers"]:
                _log.warning("%s is not used: %s", isa, problem)
            is_given = library.isa == isa
            library.close()
            if not is_given:
                break
        if isa == ISAS[0]:
            raise BuildError(f"no library for {isa} works")
        isa = ISAS[ISAS.index(isa) - 1]


class _OnlyViews(TorchDispatchMode):
    """Refuses torch operations that compute, because a recorded program would not repeat them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would load its compiler (a second, 100 MiB) only to leave this class alone."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket not in _VIEWS:
            raise NotRecordable(f"{func} is not a compiled op")
        return func(*args, **(kwargs or {}))


@cache
def signatures() -> dict[str, tuple[type | None, list[type | None]]]:
    """Every exported function's result and argument types, read from the sources."""
    found: dict[str, tuple[type | None, list[type | None]]] = {}
    for source in sorted(SOURCES.glob("*.cpp")):
        for result, name, arguments in _EXPORT.findall(source.read_text(encoding="utf-8")):
            words = [a for a in re.sub(r"//[^\n]*", "", arguments).split(",") if a.strip()]
            found[name] = (_type_of(result), [_type_of(_without_name(a)) for a in words])
    return found


def _sizes(*given: int) -> Array[ctypes.c_int64]:
    """The sizes of a run; missing ones are 0."""
    return (ctypes.c_int64 * 5)(*given)


def _succeed(failure: bytes | None) -> None:
    """
    Raises:
        DeviceError: the run failed; the text gives the reason.
    """
    if failure:
        raise DeviceError(failure.decode(), hint="the replica ends; start it again")


def _without_name(argument: str) -> str:
    return re.sub(r"\b\w+\s*$", "", argument.strip()) or argument


def _type_of(declared: str) -> type | None:
    declared = declared.replace("const", "").strip()
    if "*" in declared:
        return ctypes.c_char_p if declared.startswith("char") else ctypes.c_void_p
    return _TYPES[declared]


def _aligned(size: int) -> np.ndarray:
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return raw[first : first + size]


def _free(functions: Functions, pool: Pointer, scratch: Pointer) -> None:
    functions["bn_program_free"](pool, scratch)
    functions["bn_pool_free"](pool)


def _free_program(
    functions: Functions,
    closing: weakref.finalize,  # type: ignore[type-arg]
    pool: Pointer,
    program: Pointer,
) -> None:
    functions["bn_program_free"](pool if closing.alive else 0, program)


_READ_FLOATS = 64 << 20
"""256 MiB: larger than any cache, so the reads come from memory."""
_ROUNDS = 1_000_000
_PASSES = 40_000
_PATIENCE = 1 << 20
"""Most polls for a turn, of some nanoseconds each."""
_PIECES_PER_THREAD = 4
_RUNS = 5


def measure_peaks(library: Library) -> Peaks:
    """Best of five runs, half a second in all."""
    data = np.ones(_READ_FLOATS, np.float32)
    return Peaks(
        _best(library, 2, _READ_FLOATS, data),
        _best(library, 0, _ROUNDS, data),
        _best(library, 1, _ROUNDS, data),
        _best(library, 3, _ROUNDS, data),
        _passing(library),
    )


def _best(library: Library, kind: int, amount: int, data: np.ndarray) -> float:
    pieces = library.threads * _PIECES_PER_THREAD
    done = np.zeros(pieces, np.float64)
    best = 0.0
    for _ in range(_RUNS):
        began = time.perf_counter()
        library.call("bn_probe", pieces, kind, amount, data.ctypes.data, done.ctypes.data)
        best = max(best, float(done.sum()) / (time.perf_counter() - began))
    return best


def _passing(library: Library) -> float:
    """Seconds from core to core; 0 = one thread only, or the others do not answer."""
    if library.threads < 2:
        return 0.0
    turns, best = max(1, _PASSES // library.threads), 0.0
    for _ in range(_RUNS):
        line = np.zeros(1, np.int64)
        began = time.perf_counter()
        library.call("bn_probe_passing", library.threads, turns, _PATIENCE, line.ctypes.data)
        took = time.perf_counter() - began
        if line[0] > 0 and (not best or took / line[0] < best):
            best = took / int(line[0])
    return best
