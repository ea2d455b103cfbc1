"""`banyan verify` against a real server: it agrees with its own files and with no others."""

from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.cli.main import VERBS, main
from tests.system.checkpoint import write_tiny_model
from tests.system.serving import Server


def test_a_served_model_agrees_with_its_own_files(
    shared_server: Server, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["verify", str(tiny_model), "--url", shared_server.url]
    assert main([*words, "--output-len", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("agrees: ") and "of 72 tokens" in lines[-1]
    assert main([*words, "--prompts", "One two", "--mean", "0"]) == 1  # rounded kernels are near
    assert "DIFFERS" in capsys.readouterr().out


def test_a_served_model_differs_from_other_weights(
    shared_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_tiny_model(tmp_path / "other", seed=1)
    words = ["verify", str(other), "--url", shared_server.url, "--prompts", "One two three"]
    assert main([*words, "--output-len", "8"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERS" in out and "--cpu-activations fp32" in out


@pytest.mark.parametrize("words", [("--output-len", "0"), ("--mean", "-1"), ("--margin", "nan")])
def test_a_question_that_is_none_is_refused(words: tuple[str, ...], tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=words[0]):
        VERBS.load("verify")([str(tiny_model), *words])


def test_missing_packages_are_named_together_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(words: list[str]) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("banyan.cli.verify.private_server", started)
    monkeypatch.setattr("banyan.cli.verify.find_spec", lambda name: None)
    assert main(["verify", str(demo_model)]) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert "transformers, gguf, accelerate" in error and "[verify]" in error
