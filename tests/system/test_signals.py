"""What a server does on signals that do not end it."""

import os
import signal
from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.server.lifecycle.serve import install_sigquit_handler
from banyan.sim.replay import check
from tests.support.flags import config_of
from tests.system.conftest import StartServer
from tests.system.serving import wait_until

ASKED = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
CODE = """
def received(number, frame):
    with open({record!r}, "a") as file:
        file.write(f"{{number}} ")
    raise RuntimeError("of the handler's own")
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that mine:received writes to."""
    record = tmp_path / "record"
    (tmp_path / "mine.py").write_text(CODE.format(record=str(record)))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    return record


def named(*words: str) -> tuple[str, ...]:
    """The flag of a server as it was understood; none where it was not."""
    name = config_of(*words).observe.sigquit_handler
    return ("--custom-sigquit-handler", name) if name else ()


def test_sigquit_calls_the_function_that_was_named(server: StartServer, own_code: Path) -> None:
    with server(*named("--custom-sigquit-handler", "mine:received")) as running:
        running.signal(signal.SIGQUIT)
        called = lambda: own_code.exists() and own_code.read_text()  # noqa: E731
        wait_until(
            lambda: bool(called()) or running.process.poll() is not None,
            deadline_s=60.0,
            what="the function to be called",
        )
        assert called().split() == [str(int(signal.SIGQUIT))]
        assert running.generate(**ASKED)["output_ids"], "a handler that fails ends nothing"


def test_it_is_called_when_engines_stay_lost_and_nothing_is_dumped_without_a_folder(
    server: StartServer, own_code: Path
) -> None:
    flags = ("--engine-restarts", "0", "--custom-sigquit-handler", "mine:received")
    with server(*flags) as running:
        running.signal(signal.SIGUSR1)
        wait_until(lambda: "--crash-dump-folder" in running.tail(), 60, "a word on dumps")
        answer = running.http.post("/flight_recorder")
        assert answer.status_code == 404 and "--crash-dump-folder" in answer.text
        os.kill(running.engine_pid(), signal.SIGKILL)
        wait_until(own_code.exists, 60, "the function to be called")


def test_code_that_lies_with_a_checkpoint_is_never_called(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "beside_weights.py").write_text("def received(number, frame): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="lies with the checkpoint"):
        install_sigquit_handler("beside_weights:heard", str(tmp_path))


def test_sigusr1_and_the_route_dump_what_is_recorded(server: StartServer, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    with server("--crash-dump-folder", str(folder)) as running:
        running.generate(**ASKED)
        running.signal(signal.SIGUSR1)
        wait_until(lambda: len(dumps(folder)) == 2, 60, "the dumps")
        (journal,) = folder.glob("*.journal")
        wait_until(lambda: is_whole(journal), 60, "the journal to be written")
        answer = running.http.post("/flight_recorder")
        assert answer.status_code == 200
        assert {Path(name).suffix for name in answer.json()["files"]} == {".jsonl", ".journal"}
        assert all(is_whole(Path(n)) for n in answer.json()["files"] if n.endswith("journal"))
        assert running.generate(**ASKED)["output_ids"]


def dumps(folder: Path) -> list[Path]:
    return list(folder.glob("*")) if folder.exists() else []


def is_whole(journal: Path) -> bool:
    return journal.stat().st_size > 0 and check(str(journal)).ok
