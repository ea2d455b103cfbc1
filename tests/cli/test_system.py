"""Where Banyan cannot run it says so in one line, before anything is started."""

import json
from pathlib import Path

import pytest

import banyan
from banyan.base.errors import ConfigError
from banyan.cli.main import main


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banyan.base.os.SYSTEM", "Darwin")


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize("verb", ["serve", "batch in.jsonl out.jsonl", "bench batch"])
def test_every_verb_that_starts_an_engine_names_the_system(
    verb: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    Path("in.jsonl").write_text(json.dumps(line) + "\n")
    assert main([*verb.split(), "--model-path", "demo"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "Banyan needs Linux, and this is Darwin. Run it in Docker" in said


@pytest.mark.usefixtures("mac")
def test_the_offline_engine_says_the_same() -> None:
    with pytest.raises(ConfigError, match="Banyan needs Linux, and this is Darwin"):
        banyan.Engine("demo")


@pytest.mark.usefixtures("mac")
def test_the_doctor_does_not_call_it_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 1
    assert "verdict      Banyan needs Linux, and this is Darwin" in capsys.readouterr().out


def test_the_doctor_names_the_system(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "\nsystem       Linux " in capsys.readouterr().out
