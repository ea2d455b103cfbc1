"""`banyan batch IN OUT`: every line answered once, also when an earlier run was cut short."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.cli.batch import Progress, batch
from banyan.cli.main import main
from banyan.server.store.batches import answer_line
from tests.support.batches import as_jsonl, line
from tests.system.checkpoint import write_tiny_model


def run(source: Path, out: Path, model: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "banyan", "batch", str(source), str(out), str(model)]
    flags = ["--threads", "1", "--max-total-tokens", "8192"]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)


def test_a_run_goes_on_where_an_earlier_one_was_cut_short(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(f"l{i}", max_tokens=2) for i in range(8)] + [line("bad", temperature=-1)]
    source.write_bytes(as_jsonl(lines))
    kept = answer_line("kept", "l0", {"status_code": 200})
    out.write_bytes(kept + answer_line("torn", "l1", {"status_code": 200})[:-5])
    ended = run(source, out, write_tiny_model(tmp_path / "model"))
    assert ended.returncode == 1, ended.stderr
    assert "8 answered, 1 refused" in ended.stdout and "\r" not in ended.stderr
    answers = [json.loads(text) for text in out.read_text().splitlines()]
    assert sorted(a["custom_id"] for a in answers) == sorted(x["custom_id"] for x in lines)
    assert out.read_bytes().startswith(kept)
    refused = next(a for a in answers if a["custom_id"] == "bad")
    assert refused["response"]["status_code"] == 400


def test_a_finished_file_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(as_jsonl([line("a")]))
    out.write_bytes(answer_line("r", "a", {"status_code": 200}))
    assert batch([str(source), str(out), "no/such/model"]) == 0
    assert "1 answered" in capsys.readouterr().out
    assert len(out.read_bytes().splitlines()) == 1


@pytest.mark.parametrize(
    "content",
    [
        as_jsonl([line("a"), line("b")]),
        as_jsonl([line("a")]).rstrip(),
        b"notes of mine",
        answer_line("r", "a", {"status_code": 200}) + b"notes\n" + b"of mine\n",
        answer_line("r", "a", {"status_code": 200})[:-5] + b"\n" + b"more\n",
    ],
    ids=["an input", "an input of one line", "text", "text behind an answer", "a broken line"],
)
def test_a_file_of_something_else_is_never_written_over(tmp_path: Path, content: bytes) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(as_jsonl([line("a")]))
    out.write_bytes(content)
    with pytest.raises(ConfigError, match=r"out.jsonl.*line \d.*no answer"):
        batch([str(source), str(out), "no/such/model"])
    assert out.read_bytes() == content


@pytest.mark.parametrize("how", ["the same name", "a link"])
def test_the_input_is_not_taken_for_the_output(tmp_path: Path, how: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(as_jsonl([line("a")]))
    out = source
    if how == "a link":
        out = tmp_path / "out.jsonl"
        out.symlink_to(source)
    with pytest.raises(ConfigError, match="the same file"):
        batch([str(source), str(out), "no/such/model"])
    assert source.read_bytes() == as_jsonl([line("a")])


def test_a_faulty_file_is_reported_by_its_lines(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(as_jsonl([line("a"), {"custom_id": "b"}]))
    with pytest.raises(ConfigError, match="line 2: method must be POST"):
        batch([str(source), str(tmp_path / "out")])


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = pty.openpty()
    with os.fdopen(inner, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        progress = Progress(4)
        progress.show(1)
        progress.end()
        assert "1/4" in os.read(outer, 1000).decode()
    os.close(outer)
