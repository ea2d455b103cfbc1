"""A server that tokenizes in processes of its own, and texts of several requests together."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from banyan.tokenizer.load import load_tokenizer
from tests.system.conftest import with_tiny_model
from tests.system.serving import CALL_S, Server, runs, serving, wait_until
from tests.system.watch import watched

WORKER = "banyan.tokenizer.encode_worker"
FLAGS = ("--tokenizer-worker-num", "2", "--enable-dynamic-batch-tokenizer")
MANY = "many words and numbers 123 " * 40_000
MAX_BLOCKED_S = 0.2


@pytest.fixture(scope="module")
def tokenizing(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("tokenizing") / "server.log"
    with serving(log, *with_tiny_model(FLAGS, tiny_model)) as running:
        yield running


def workers(server: Server) -> list[psutil.Process]:
    return [c for c in psutil.Process(server.pid).children() if runs(c, WORKER)]


def cpu_s(*processes: psutil.Process) -> float:
    return sum(p.cpu_times().user + p.cpu_times().system for p in processes)


def tokens(server: Server, text: str) -> list[int]:
    answer = server.http.post("/tokenize", json={"prompt": text})
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


def test_texts_are_tokenized_in_so_many_processes(tokenizing: Server, tiny_model: Path) -> None:
    found = workers(tokenizing)
    assert len(found) == 2
    text = MANY[: 27 * 4_000]
    before, own_before = cpu_s(*found), cpu_s(psutil.Process(tokenizing.pid))
    with ThreadPoolExecutor(8) as pool, watched(tokenizing) as seen:
        ids = list(pool.map(lambda _: tokens(tokenizing, text), range(24)))
    expected = load_tokenizer(str(tiny_model)).encode(text)
    assert all(one == expected for one in ids)
    spent, own_spent = cpu_s(*found) - before, cpu_s(psutil.Process(tokenizing.pid)) - own_before
    print(f"in processes {spent:.2f} s, in the server {own_spent:.2f} s, {seen}")
    assert spent > 0 and seen.blocked_s < MAX_BLOCKED_S
    assert all(cpu_s(worker) > 0 for worker in found)


def test_every_route_gives_the_answers_of_a_server_without_them(
    tokenizing: Server, shared_server: Server
) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "seed": 1}
    text = {"prompt": "Hello you", "max_tokens": 4, "temperature": 0}
    native = {"text": ["Hello", "you"], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}

    def texts(running: Server) -> list[object]:
        def ask(number: int) -> object:
            path, body = (
                ("/v1/chat/completions", chat), ("/v1/completions", text), ("/generate", native)
            )[number % 3]  # fmt: skip
            found = running.http.post(path, json=body)
            assert found.status_code == 200, found.text
            if path == "/generate":
                return [answer["output_ids"] for answer in found.json()]
            (choice,) = found.json()["choices"]
            return choice.get("text") or choice["message"]["content"]

        with ThreadPoolExecutor(24) as pool:
            return list(pool.map(ask, range(24)))

    assert texts(tokenizing) == texts(shared_server)


def test_a_turn_of_a_session_and_a_stream_are_tokenized_there_too(tokenizing: Server) -> None:
    http = tokenizing.http
    session = http.post("/open_session", json={"capacity_of_str_len": 500}).json()
    body = {
        "text": "Hello",
        "session_params": {"id": session},
        "sampling_params": {"max_new_tokens": 2},
    }
    assert http.post("/generate", json=body).status_code == 200
    stream = {"text": "Hello", "stream": True, "sampling_params": {"max_new_tokens": 2}}
    assert "[DONE]" in http.post("/generate", json=stream).text


def test_processes_that_die_are_replaced(tokenizing: Server) -> None:
    expected = tokens(tokenizing, "Hello you")
    for worker in workers(tokenizing):
        worker.kill()

    def is_answered() -> bool:
        answer = tokenizing.http.post("/tokenize", json={"prompt": "Hello you"})
        assert answer.status_code in (200, 500), "it may be the one that finds out"
        return answer.status_code == 200

    wait_until(is_answered, CALL_S, "another process")
    assert tokens(tokenizing, "Hello you") == expected
