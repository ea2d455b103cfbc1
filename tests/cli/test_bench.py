"""`banyan bench` as people run it: tables, files, exit codes."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.cli.bench import progress_bar
from banyan.cli.main import main
from tests.bench.scripted import Answer, Script, Scripted, scripted_server, whole
from tests.bench.test_serving import SMALL, banyan


@contextmanager
def served(answer: Answer) -> Iterator[Scripted]:
    """A scripted server on a loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait(work: object) -> object:
        return asyncio.run_coroutine_threadsafe(work, loop).result()  # type: ignore[arg-type]

    context = scripted_server(answer)
    seen = wait(context.__aenter__())
    assert isinstance(seen, Scripted)
    yield seen
    wait(context.__aexit__(None, None, None))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def server() -> Iterator[Scripted]:
    with served(_answer) as seen:
        yield seen


def _answer(route: str, body: dict) -> Script:
    if route == "/generate" and body["sampling_params"]["max_new_tokens"] == 13:
        return whole({"error": {"message": "unlucky"}}, status=500)
    return banyan(route, body)


def test_a_run_prints_the_table_and_appends_a_line(
    server: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.jsonl"
    words = ["bench", "serving", "--base-url", server.url, *SMALL.split()]
    for tag in ("one", "two"):
        assert main([*words, "--output-file", str(path), "--tag", tag]) == 0
    out, err = capsys.readouterr()
    assert out.count("Serving Benchmark Result") == 2
    assert "█" not in err, "a progress bar on something that is no terminal"
    assert err.count(f"the figures are the last line of {path}") == 2
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["tag"] for row in rows] == ["one", "two"]
    assert rows[0]["completed"] == 5


def test_the_key_of_the_environment_is_sent(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BANYAN_API_KEY", "secret")
    words = ["bench", "serving", "--base-url", server.url, *SMALL.split()]
    assert main([*words, "--output-file", str(tmp_path / "out.jsonl")]) == 0
    assert {h.get("authorization") for h in server.headers} == {"Bearer secret"}


def test_a_run_in_which_nothing_completed_ends_with_code_1_and_the_errors(
    server: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--random-output-len 13 --random-range-ratio 1 --num-prompts 3 --warmup-requests 0"
    words = ["bench", "serving", "--base-url", server.url, *line.split()]
    assert main([*words, "--output-file", str(tmp_path / "out.jsonl")]) == 1
    assert "3 × HTTP 500: unlucky" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["fly"], "unknown benchmark 'fly'"),
        (["serving", "--profile"], "--profile is not offered"),
        (["serving", "--dataset-name", "sharegpt"], "--dataset-path"),
        (["batch", "--batch-size", "0"], "at least 1"),
    ],
)
def test_what_cannot_run_ends_with_code_2_and_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_a_server_that_is_not_there_is_waited_for_with_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "--base-url http://127.0.0.1:9 --ready-check-timeout-sec 0.3"
    assert main(["bench", "serving", *words.split()]) == 1
    waits, ends = capsys.readouterr().err.splitlines()
    assert waits.startswith("waiting up to 0.3 s for http://127.0.0.1:9: ")
    assert "no server within 0.3 s" in ends


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    holding = threading.Event()

    def answer(route: str, body: dict) -> Script:
        script = banyan(route, body)
        if route == "/generate" and asked.count("/generate") == 2:
            script.hold = asyncio.Event()
            holding.set()
        asked.append(route)
        return script

    asked: list[str] = []
    path = tmp_path / "out.jsonl"
    with served(answer) as server:
        words = ["--base-url", server.url, *SMALL.split(), "--output-file", str(path)]
        words += ["--max-concurrency", "1", "--warmup-requests", "0"]
        command = [sys.executable, "-m", "banyan", "bench", "serving", *words]
        run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert holding.wait(120)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=120)
    assert run.returncode == 130, err
    assert "Serving Benchmark Result" in out
    assert "stopped after 2 requests; the figures are theirs alone" in err
    assert f"the figures are the last line of {path}" in err
    (row,) = map(json.loads, path.read_text().splitlines())
    assert (row["completed"], row["failed"]) == (2, 0)


def test_where_there_is_no_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banyan.cli.bench._LINE_S", 0.0)
    progress_bar("requests")(3, 9)
    progress_bar("requests", is_wanted=False)(4, 9)
    assert capsys.readouterr().err == "requests: 3 of 9\n"


def test_help_names_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("serving", "batch", "throughput", "eval"))
    assert main(["bench"]) == ConfigError.exit_code
    assert capsys.readouterr().err == out
