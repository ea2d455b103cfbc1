from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.config.argv import read_mapping
from banyan.config.cli import parse
from banyan.config.env import Environment


def start(folder: Path, text: str | bytes) -> object:
    path = folder / "flags.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return parse(["--config", str(path)], Environment())


def test_a_file_in_the_form_of_the_documents_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model-path: here\nhost: 0.0.0.0\nport: 30001\n"
        "tensor-parallel-size: 2\nlog-requests: true\ndp_size: 1\nrevision: null\n"
    )
    config = parse(["--config", str(path)], Environment())
    assert (config.model.source, config.server.host, config.server.port) == (
        "here",
        "0.0.0.0",
        30001,
    )
    assert (config.parallel.tp, config.observe.log_requests) == (2, True)


def test_json_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "flags.json"
    path.write_text('{"port": 7, "preferred-sampling-params": {"top_p": 0.5}}')
    config = parse(["--config", str(path)], Environment())
    assert (config.server.port, config.server.preferred_sampling) == (7, {"top_p": 0.5})


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("# only a comment\n")
    assert read_mapping(str(path), "--config") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: [", "not YAML at line"),
        ("a\tb: :\n - x: {", "not YAML"),
        ("- port", "must be a mapping"),
        ("1: 2", "must be a mapping"),
        ("port: 1\nport: 2", "port is given twice"),
        ("prot: 1", "Did you mean --port"),
        ("port: true", "must be a whole number, got True"),
        ("port: 'x'", "must be a whole number"),
        ("port: 1.5", "whole number"),
        ("port: " + "59:" * 4000 + "59", "line 1: a number of more than 40 digits"),
        ("port: 0x" + "f" * 5000, "line 1: a number of more than 40 digits"),
        ("port: " + "9" * 5000, "line 1: a number of more than 40 digits"),
        ("port: 59:59:59", "got 215999"),
        ("log-requests: 1", "true or false, got 1"),
        ("host: [a]", "must be a text"),
        ("encoder-only: true", "not available in this build"),
        ("port: !!python/object/apply:os.getcwd []", "not YAML"),
        (b"\xff\xfe\x00port", "not YAML"),
    ],
)
def test_a_mistake_in_the_file_is_refused_with_its_place(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match="flags.yaml") as caught:
        start(tmp_path, text)
    assert message in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot read --config nowhere.yaml"):
        parse(["--config", "nowhere.yaml"], Environment())


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than"):
        start(tmp_path, "#" * (1 << 21))
