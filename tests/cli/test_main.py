"""The command as people meet it: a process with an exit code and a line of text."""

import os
import subprocess
import sys

import pytest

from banyan.base import torch_parts
from banyan.cli.main import VERBS


def banyan(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BANYAN_", "SGLANG_"))}
    return subprocess.run(
        [sys.executable, "-m", "banyan", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**kept, **variables},
        stdin=subprocess.DEVNULL,
    )


def modules_after(code: str) -> set[str]:
    script = f"import sys\ntry:\n    {code}\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return set(done.stderr.split())


def test_help_names_every_verb() -> None:
    done = banyan("--help")
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in ("serve", "chat", "replay", "doctor"))


def test_serve_help_shows_the_groups_of_flags() -> None:
    done = banyan("serve", "--help")
    assert done.returncode == 0
    assert all(
        word in done.stdout for word in ("Scheduler:", "--page-size", "--tp-size", "[30000]")
    )


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["serve", "--pork"]])
def test_help_and_refusals_load_nothing_heavy(words: list[str]) -> None:
    loaded = modules_after(f"__import__('banyan.cli.main').cli.main.main({words!r})")
    assert "banyan.cli.main" in loaded
    assert not loaded & {"torch", "numpy", "fastapi", "uvicorn", "transformers", "tokenizers"}


@pytest.mark.parametrize(
    "words",
    [["models"], ["plan", "demo"], ["config", "demo"], ["doctor"], ["list"], ["--version"]],
    ids=lambda words: words[0],
)
def test_what_only_shows_facts_does_without_torch(words: list[str]) -> None:
    loaded = modules_after(f"__import__('banyan.cli.main').cli.main.main({words!r})")
    assert VERBS._entries[words[0].removeprefix("--")].partition(":")[0] in loaded
    assert not loaded & {"torch", "numpy", "transformers"}


def test_the_server_process_computes_nothing_so_it_loads_nothing_for_that() -> None:
    loaded = modules_after(
        "import banyan.server.processes, banyan.config.prepare, banyan.server.lifecycle.serve"
    )
    assert "banyan.server.lifecycle.serve" in loaded
    assert not loaded & {"torch", "numpy", "transformers"}


def test_an_engine_loads_torch_without_what_serving_does_not_use() -> None:
    loaded = modules_after("from banyan.server.processes import main; main()")
    assert {"torch", "banyan.engine.core_process"} <= loaded
    assert not loaded & {*torch_parts._PARTS}


@pytest.mark.parametrize(
    ("words", "code", "culprit"),
    [
        (["sreve"], 2, "'sreve'. Did you mean banyan serve?"),
        (["\x1b[2J"], 2, "See banyan --help"),
        (["batch"], 2, "Write: banyan batch IN.jsonl OUT.jsonl"),
        (["lora"], 2, "Write: banyan lora inspect PATH"),
        (["serve", "--prot", "1"], 2, "--port"),
        (["serve", "--port", "0", "no-such-model"], 3, "'no-such-model'"),
        (["chat", "--url", "nonsense"], 2, "--url 'nonsense'"),
        (["cache", "ls"], 2, "'banyan cache ls'"),
    ],
)
def test_a_mistake_ends_in_one_line_that_names_it(
    words: list[str], code: int, culprit: str
) -> None:
    done = banyan(*words)
    assert done.returncode == code, done.stderr
    assert culprit in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("banyan: error: ")


def test_the_other_name_of_serve_takes_the_same_flags() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "banyan.launch_server", "--model-path", "no-such-model", "--port=0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3 and "'no-such-model'" in done.stderr


def test_flags_without_an_effect_are_shown_at_the_start() -> None:
    done = banyan("serve", "no-such-model", "--port=0", "--sleep-on-idle", SGLANG_FOO="1")
    assert "--sleep-on-idle is accepted but has no effect" in done.stderr
    assert "SGLANG_FOO is set but has no effect" in done.stderr


def test_a_key_shows_in_no_output() -> None:
    done = banyan(
        "serve", "no-such-model", "--port=0", "--log-level=debug", BANYAN_API_KEY="sk-1a2b"
    )
    assert done.returncode == 3 and "sk-1a2b" not in done.stderr + done.stdout


def test_the_version_is_printed() -> None:
    done = banyan("version", "--json")
    assert done.returncode == 0 and '"python"' in done.stdout


def test_the_doctor_reports_the_machine() -> None:
    done = banyan("doctor")
    assert done.returncode == 0, done.stderr
    facts = ("python", "torch", "cores", "memory", "compilers", "demo model", "verdict")
    for word in (*facts, "settings     swappiness="):
        assert any(line.startswith(word) for line in done.stdout.splitlines()), word
