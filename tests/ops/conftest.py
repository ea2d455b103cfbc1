"""The compiled library, in every instruction set: those of this machine, and the wider ones in an
emulation."""

import pytest

from banyan.ops.cpu.build import (
    ISAS,
    BuildError,
    cached_library,
    compilers,
    machine_isa,
    usable_isa,
)
from banyan.ops.cpu.library import Library
from tests.ops.emulation import cached_emulation, cached_native


@pytest.fixture(scope="session")
def path():
    """The library of this machine, as it is served."""
    try:
        return cached_library()
    except BuildError as error:
        pytest.skip(f"the compiled kernels cannot be built here: {error}")


@pytest.fixture(scope="session")
def emulated_path():
    compiler = next(compilers(), None)
    if compiler is None or machine_isa() == "base":
        pytest.skip("wider machines are emulated with AVX2 and a C++ compiler")
    return cached_emulation(compiler.words)


@pytest.fixture(scope="session")
def lower_path(path, request):
    """A library that runs lower instruction sets than the machine's best, too: the emulating one,
    where it is needed anyway."""
    if machine_isa() != ISAS[-1]:
        return request.getfixturevalue("emulated_path")
    compiler = next(compilers(), None)
    if compiler is None:
        pytest.skip("no C++ compiler is here")
    return cached_native(compiler.words)


def beside_the_best(isa: str) -> list[tuple[str, int]]:
    """One more machine where `isa` is not the best of this one: as it is where that has more,
    emulated where it has less."""
    here, there = ISAS.index(machine_isa()), ISAS.index(isa)
    return [] if here == there else [(isa if here > there else f"{isa}, emulated", 1)]


MACHINES = [("base", 1), ("avx2", 1), ("amx", 2), *beside_the_best("vnni")]
"""Instruction sets, at most what the machine has unless they are emulated, and threads."""


@pytest.fixture(params=MACHINES, ids=str)
def library(request):
    yield from open_library(request)


def open_library(request):
    """The library of a fixture's parameter, closed afterwards."""
    machine, threads = request.param
    isa, _, is_emulated = machine.partition(", ")
    if is_emulated:
        name = "emulated_path"
    else:
        name = "path" if usable_isa(isa) == machine_isa() else "lower_path"
    path = request.getfixturevalue(name)
    library = Library(path, threads, isa)
    yield library
    library.close()
