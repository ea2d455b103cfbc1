"""The wheel as people install it, where no compiler is: `make test-wheel` makes the environment."""

import json
import os
import socket
import subprocess
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from banyan.server.console import files

WHEEL = os.environ.get("WHEEL", "")
"""A virtual environment that the wheel is installed into."""
PATIENCE_S = 180.0
PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
EXTRAS = sorted({*PROJECT["project"]["optional-dependencies"]} - {"test", "dev", "docs"})
pytestmark = pytest.mark.skipif(not WHEEL, reason="make test-wheel")


@dataclass(frozen=True)
class Served:
    url: str
    home: Path
    log: Path

    def ask(self, path: str, body: object = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the demo with nothing on its path but the environment, and an empty home."""
    home, programs = tmp_path_factory.mktemp("home"), (Path(WHEEL) / "bin").resolve()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = home / "log"
    with open(log, "w") as written:
        process = subprocess.Popen(
            [programs / "banyan", "serve", "--port", str(port), "--log-level", "info"],
            stdout=written,
            stderr=subprocess.STDOUT,
            cwd=home,
            env={"PATH": str(programs), "HOME": str(home)},
        )
    try:
        server = Served(f"http://127.0.0.1:{port}", home, log)
        until_ready(server, process)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def until_ready(server: Served, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline, server.log.read_text()
        try:
            server.ask("/readyz")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)


def test_the_demo_is_served_by_kernels_that_came_along(served: Served) -> None:
    output = served.log.read_text()
    assert "compiled CPU kernels: " in output and "plain torch" not in output, output
    assert "compiling" not in output
    assert not (served.home / ".cache" / "banyan" / "kernels").exists()


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_hint_of_an_extra_installs_its_packages(extra: str, tmp_path: Path) -> None:
    python = (Path(WHEEL) / "bin").resolve() / "python"
    code = f"from banyan.base.install import install_command; print(install_command({extra!r}))"
    hint = subprocess.run(
        [python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    line = f"{hint.strip()} --dry-run -q --report -"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    names = {item["metadata"]["name"] for item in json.loads(done.stdout)["install"]}
    assert "banyan" not in names and "banyan-serve" not in names


def test_an_answer_comes(served: Served) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    answer = served.ask("/v1/completions", body)
    assert "Paris" in answer["choices"][0]["text"]


def test_the_console_came_along_with_its_libraries(served: Served) -> None:
    for name, file in files().items():
        with urllib.request.urlopen(f"{served.url}/console/{name}", timeout=PATIENCE_S) as answer:
            assert answer.read() == file.body, name
