"""Coding agents as people install them, unchanged, against a server whose model is scripted: the
agent asks, the model calls a tool of the agent's, the agent runs it, and the model ends.

`make test-clients` installs them into .clients/agents; without them these tests are skipped.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from banyan.requests.request_spec import RequestSpec
from banyan.requests.sampling_params import Limits
from tests.clients.conftest import CLIENTS, SCRIPTS
from tests.server.fakes import MODEL_CONFIG, Site, Step, steps
from tests.server.talk import TEMPLATE, service_with

AGENTS = CLIENTS / "agents"
BIN = AGENTS / "node_modules" / ".bin"
AGENT_S = 120.0
DONE = "All is done."
RESULT = "MADE-IT"
WORK = f"echo {RESULT}; touch made"
CALLS = {
    "Bash": {"command": WORK, "description": "make it"},
    "exec_command": {"cmd": WORK},
    "shell_command": {"command": WORK},
    "shell": {"command": ["bash", "-lc", WORK]},
}
"""Tools of the agents that run a command, with the arguments that do."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (AGENTS / ".installed").exists(), reason="not installed: make test-clients"
    ),
]


@pytest.fixture
def site() -> Iterator[Site]:
    """A server whose model calls a command once and ends when it sees the result."""
    with Site().serving() as served:
        limits = Limits(1 << 20, MODEL_CONFIG.vocab_size, (256,))
        service = service_with(served, TEMPLATE, "hermes", "qwen3")
        served.generator.limits = limits
        served.state.service = replace(service, limits=limits)
        served.generator.script = lambda request: _answer(served, request)
        yield served


def _answer(site: Site, request: RequestSpec) -> list[Step]:
    prompt = site.tokenizer.decode(request.prompt, skip_special_tokens=False)
    if RESULT in prompt.split("</tool_call>")[-1]:
        return steps(*DONE.partition(" "))
    name = next((name for name in CALLS if f'"name": "{name}"' in prompt), None)
    if name is None:
        return steps("A title")  # agents ask for one without tools
    call = json.dumps({"name": name, "arguments": CALLS[name]})
    return steps("I run it. ", f"<tool_call>\n{call[:20]}", f"{call[20:]}\n</tool_call>")


def run(command: list[str], folder: Path, **variables: str) -> str:
    """The standard output of an agent that has ended well, in a home of its own."""
    home = folder / "home"
    home.mkdir()
    known = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home)}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**known, "NO_COLOR": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=AGENT_S,
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def test_codex_runs_a_command_and_ends(site: Site, tmp_path: Path) -> None:
    provider = f'{{name="banyan", base_url="{site.url}/v1", wire_api="responses", env_key="KEY"}}'
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    settings = ["-c", "model_provider=banyan", "-c", f"model_providers.banyan={provider}"]
    command = [str(BIN / "codex"), "exec", *flags, *settings, "-m", "tiny", "Say hi"]
    events = [json.loads(line) for line in run(command, tmp_path, KEY="x").splitlines()]
    items = [e["item"] for e in events if e["type"] == "item.completed"]
    (ran,) = (item for item in items if item["type"] == "command_execution")
    assert (ran["exit_code"], ran["aggregated_output"]) == (0, f"{RESULT}\n")
    assert [item["text"] for item in items if item["type"] == "agent_message"][-1] == DONE
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["output_tokens"] > 0
    assert (tmp_path / "made").exists()


def test_claude_code_runs_a_command_and_ends(site: Site, tmp_path: Path) -> None:
    flags = ["--output-format", "json", "--dangerously-skip-permissions", "--max-turns", "4"]
    found = run(
        [str(BIN / "claude"), "-p", "Say hi", *flags],
        tmp_path,
        ANTHROPIC_BASE_URL=site.url,
        ANTHROPIC_API_KEY="x",
        ANTHROPIC_MODEL="tiny",
        ANTHROPIC_SMALL_FAST_MODEL="tiny",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
        IS_SANDBOX="1",  # it runs as root in containers
    )
    answer = json.loads(found)
    assert (answer["is_error"], answer["result"], answer["num_turns"]) == (False, DONE, 2)
    assert answer["usage"]["output_tokens"] > 0 and (tmp_path / "made").exists()


def test_the_ai_sdk_runs_a_tool_and_ends(site: Site, tmp_path: Path) -> None:
    command = ["node", str(SCRIPTS / "ai_sdk.mjs")]
    answer = json.loads(run(command, tmp_path, URL=site.url, CLIENT_FOLDER=str(AGENTS)))
    assert answer["ran"] == [WORK, WORK]
    assert answer["whole"] == answer["streamed"].removeprefix("I run it.").strip() == DONE
    assert all(count > 0 for count in answer["tokens"])
