"""`banyan config` shows what a start would use, and where each value came from."""

import json
from pathlib import Path

import pytest
import yaml

from banyan.cli.config import count_line
from banyan.cli.main import main
from banyan.config.cli import parse
from banyan.config.env import Environment
from tests.support.checkpoints import LLAMA, folder


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, tuple[object, str]]:
    """Flag -> (value, origin) as the command prints them."""
    assert main(["config", *argv]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    values = yaml.safe_load("\n".join(lines))
    origins = {line.partition(":")[0]: line.rpartition(" # ")[2] for line in lines}
    return {name: (values[name], origins[name]) for name in values}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return folder(tmp_path, LLAMA)


def test_each_value_tells_where_it_came_from(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("host: 127.0.0.2\nport: 1\n")
    monkeypatch.setenv("BANYAN_STREAM_INTERVAL", "4")
    found = shown(capsys, model, "--config", str(file), "--port", "2", "--tp", "1")
    assert found["port"] == (2, "flag --port")
    assert found["tensor-parallel-size"] == (1, "flag --tp")
    assert found["host"] == ("127.0.0.2", f"file {file}")
    assert found["stream-interval"] == (4, "variable BANYAN_STREAM_INTERVAL")
    assert found["page-size"] == (16, "device cpu")
    assert found["context-length"] == (LLAMA["max_position_embeddings"], "rule limit_context")


def test_what_it_prints_is_a_file_of_flags_that_says_the_same(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [model, "--disable-overlap-schedule", "--preferred-sampling-params", '{"top_k": 3}']
    first = shown(capsys, *given)
    file = tmp_path / "again.yaml"
    file.write_text(json.dumps({name: value for name, (value, _) in first.items()}))
    config = parse(["--config", str(file)], Environment())
    assert config.schedule.depth == 1 and config.server.preferred_sampling == {"top_k": 3}
    again = shown(capsys, "--config", str(file))
    assert {n: v for n, (v, _) in again.items()} == {n: v for n, (v, _) in first.items()}


def test_keys_are_not_shown(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, model, "--api-key", "sk-1")["api-key"] == (None, "flag --api-key")


def test_what_has_no_effect_is_reported_next_to_it(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", model, "--enable-profile-cuda-graph"]) == 0
    assert "--enable-profile-cuda-graph is accepted but has no effect" in capsys.readouterr().err


def test_the_count_of_the_readme_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--count"]) == 0
    assert capsys.readouterr().out.strip() == count_line()


def test_a_mistake_ends_it_as_it_would_end_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--page-size", "-3"]) == 2
    assert "--page-size" in capsys.readouterr().err
