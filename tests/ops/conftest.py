"""The compiled library, in every instruction set that this machine can run."""

import pytest

from banyan.ops.cpu.build import BuildError, cached_library
from banyan.ops.cpu.library import Library


@pytest.fixture(scope="session")
def path():
    try:
        return cached_library()
    except BuildError as error:
        pytest.skip(f"the compiled kernels cannot be built here: {error}")


@pytest.fixture(params=[("base", 1), ("avx2", 1), ("amx", 2)], ids=str)
def library(request, path):
    isa, threads = request.param
    library = Library(path, threads, isa)  # at most what the machine has
    yield library
    library.close()
