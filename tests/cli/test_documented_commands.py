"""Every command line of SGLang's documents, under our module names: a start, or a clear refusal."""

import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.cli.main import VERBS, main
from banyan.cli.router import LB, read_flags
from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.config.flags.flag import Absent
from banyan.config.flags.table import known_flags
from tests.support.documented_lines import FLAG_FILE, LINES, STARTS

REFUSED = (("--model-path M --kv-cache-dtype fp4_e2m1", ("--kv-cache-dtype", "fp4_e2m1")),)

MODULES = {
    "launch_server": ("serve", ()),
    "bench_serving": ("bench", ("serving",)),
    "bench_one_batch": ("bench", ("batch",)),
    "bench_offline_throughput": ("bench", ("throughput",)),
    "check_env": ("doctor", ()),
    "launch_router": ("router", ()),
    "launch_lb": ("lb", ()),
}


@pytest.mark.parametrize("name", [name for name in STARTS if "file" not in name])
def test_a_documented_line_is_a_start(name: str) -> None:
    words = STARTS[name].words
    config = parse(words, Environment())
    assert config.model.source == "M"
    absent = [flag.name for flag in known_flags() if isinstance(flag, Absent)]
    given = [word for word in words if word[2:] in (*absent, "attention-backend")]
    assert all(any(flag in note for note in config.observe.notes) for flag in given)


@pytest.mark.parametrize(("line", "named"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_documented_line_is_refused_with_everything_that_is_missing(
    line: str, named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(line.split(), Environment())
    text = str(caught.value)
    assert all(flag in text for flag in named) and "\n" not in text


@pytest.mark.parametrize("metrics", ["true", "false"])
def test_the_documented_flag_file_is_a_start(metrics: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(FLAG_FILE.replace("metrics: true", f"metrics: {metrics}"))
    config = parse(["--config", str(file)], Environment())
    assert (config.model.source, config.server.host, config.server.port) == ("M", "0.0.0.0", 30000)
    assert (config.parallel.tp, config.observe.log_requests) == (2, True)
    assert config.observe.metrics == (metrics == "true") and not config.observe.notes


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[str, ...]]]]:
    """The verbs that are run, with their words; none does its work."""
    calls: list[tuple[str, tuple[str, ...]]] = []

    def load(verb: str) -> object:
        return lambda words: calls.append((verb, tuple(words))) or 0

    monkeypatch.setattr(VERBS, "load", load)
    yield calls


@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_the_documents_is_a_verb(
    module: str, called: list[tuple[str, tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, first = MODULES[module]
    assert verb in VERBS
    monkeypatch.setattr(sys, "argv", [module, "--model-path", "M"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(f"banyan.{module}", run_name="__main__")
    assert called == [(verb, (*first, "--model-path", "M"))]


def test_a_documented_line_of_the_router_starts_servers_with_the_rest_of_it() -> None:
    checked: list[Sequence[str]] = []
    config = read_flags(LINES["server arguments: router"].words, {}, checked.append)
    assert (config.pool.count, config.pool.start) == (2, ("--model-path", "M", "--tp", "2"))
    assert checked == [config.pool.start]


def test_the_documented_line_of_the_load_balancer_names_two_servers() -> None:
    words = [word.replace("IP", "h") for word in LINES["install page: balancer"].words]
    config = read_flags(words, {}, refuse_servers, LB)
    assert [(spec.url, spec.kind) for spec in config.pool.workers] == [
        ("http://h:8000", "prefill"),
        ("http://h:8001", "decode"),
    ]
    assert (config.server.host, config.server.port, config.policy.name) == (
        "127.0.0.1",
        5000,
        "random",
    )


def refuse_servers(flags: Sequence[str]) -> None:
    raise AssertionError(f"no server is to be started with {flags}")


def test_the_version_is_reported_by_serve_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--version"]) == 0 == main(["version"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


def test_help_is_no_wider_than_a_terminal_and_names_what_can_be_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 98
    for name in ("qwen25", "deepseek-r1", "chatml", "star_coder", "config --reference"):
        assert name in out


def test_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    assert "--model-path" in capsys.readouterr().out
