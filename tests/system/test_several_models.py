"""Models of one folder behind one address, with real servers: each answers as it does alone."""

import signal
import threading
from pathlib import Path

import pytest

from banyan.llm import Engine
from tests.system.checkpoint import write_tiny_model
from tests.system.routing import routing
from tests.system.serving import CALL_S, wait_until

PROMPT = "The quick brown fox"
PARAMS = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(("one", "two")):
        write_tiny_model(tmp_path / "models" / name, seed)
    return tmp_path / "models"


def test_each_model_answers_as_it_does_alone(folder: Path, tmp_path: Path) -> None:
    alone = {}
    for name in ("one", "two"):
        with Engine(str(folder / name), engine_mode="inprocess", threads=1) as engine:
            alone[name] = engine.generate(PROMPT, PARAMS)["text"]
    assert alone["one"] != alone["two"]
    flags = ("--models-dir", str(folder), "--models-max", "1", "--threads", "1")
    with routing(tmp_path / "router.log", *flags) as router:
        router.http.timeout = 3 * CALL_S
        found: dict[int, tuple[str, str]] = {}

        def ask(number: int, name: str) -> None:
            body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
            answer = router.http.post("/v1/completions", json={**body, "ignore_eos": True})
            assert answer.status_code == 200, answer.text
            found[number] = (name, answer.json()["choices"][0]["text"])

        names = ("one", "two", "one", "two")
        threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(names)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(4)] == [(name, alone[name]) for name in names]
        loaded = [m["name"] for m in router.http.get("/api/ps").json()["models"]]
        assert len(loaded) == 1
        assert router.members()
        router.signal(signal.SIGTERM)
        assert router.exit_code(CALL_S) == 0
        wait_until(lambda: not router.members(), CALL_S, "the servers to end")
