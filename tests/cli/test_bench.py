"""`banyan bench` as people run it: tables, files, exit codes."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan.cli.main import main
from tests.bench.scripted import Script, Scripted, scripted_server, whole
from tests.bench.test_serving import SMALL, banyan


@pytest.fixture
def server() -> Iterator[Scripted]:
    """A scripted server on a loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait(work: object) -> object:
        return asyncio.run_coroutine_threadsafe(work, loop).result()  # type: ignore[arg-type]

    context = scripted_server(_answer)
    seen = wait(context.__aenter__())
    assert isinstance(seen, Scripted)
    yield seen
    wait(context.__aexit__(None, None, None))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


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


def test_help_names_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("serving", "batch", "throughput"))
