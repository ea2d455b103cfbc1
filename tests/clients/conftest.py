"""Clients as people install them, each in an environment of its own, against one real server.

`make test-clients` makes the environments under .clients; without them these tests are skipped. A
script runs in the client's interpreter and prints facts; the tests say what must hold.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.scripts.facts import CITY, LONG, QUESTION, SPOKEN_CALL, WEATHER
from tests.support.checkpoints import mini_lm
from tests.system.serving import Server, serving, settled

CLIENTS = Path(__file__).resolve().parents[2] / ".clients"
SCRIPTS = Path(__file__).parent / "scripts"
KEY = "only-for-this-test"
SCRIPT_S = 300.0
PROMPTS = {
    "question": QUESTION,
    "city": CITY,
    "weather": WEATHER,
    "spokenCall": SPOKEN_CALL,
    "long": LONG,
}


@dataclass
class Facts:
    """What one script found, by name."""

    found: dict[str, dict]

    def __getitem__(self, name: str) -> object:
        fact = self.found[name]
        assert "raised" not in fact, f"{name}:\n{fact['raised']}"
        return fact["value"]


@dataclass(frozen=True)
class Servers:
    """One server for chat on the demo model, one for vectors; both want KEY."""

    chat: Server
    vectors: Server

    def count(self, **body: object) -> int:
        """Tokens of a prompt, as the server counts them without running it."""
        answer = self.chat.http.post("/v1/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["count"]

    def check_idle(self) -> None:
        """Everything has ended, and only the cache holds pages."""
        stats = settled(self.chat.stats, 0)
        assert stats["held_pages"] == 0 == stats["leaked"]
        assert stats["free_pages"] + stats["cached_pages"] == stats["total_pages"]
        assert stats["output_tokens"] < LONG, "a request that was left ran on"


Ask = Callable[..., Facts]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    logs = tmp_path_factory.mktemp("clients")
    flags = ("--api-key", KEY, "--grammar-backend", "llguidance")
    chat_flags = ("--model-path", "demo", "--tool-call-parser", "hermes", *flags)
    vector_flags = ("--model-path", str(mini_lm()), "--threads", "1", *flags)
    with (
        serving(logs / "chat.log", *chat_flags) as chat,
        serving(logs / "vectors.log", *vector_flags) as vectors,
    ):
        chat.http.headers["authorization"] = f"Bearer {KEY}"
        yield Servers(chat, vectors)


@pytest.fixture(scope="session")
def ask(request: pytest.FixtureRequest) -> Ask:
    """`ask(environment, script, NAME=value)`: run a script in a client's environment with these
    variables, and its facts."""

    def run(environment: str, script: str, **more: str) -> Facts:
        interpreter = _interpreter(environment)
        servers: Servers = request.getfixturevalue("servers")
        variables = {
            **os.environ,
            "CHAT_URL": servers.chat.url,
            "CHAT_KEY": KEY,
            "VECTORS_URL": servers.vectors.url,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network at its import
            "CLIENT_FOLDER": str(CLIENTS / environment),
            **more,
        }
        done = subprocess.run(
            [*interpreter, str(SCRIPTS / script)],
            env=variables,
            input=json.dumps(PROMPTS),  # for scripts that cannot import them
            capture_output=True,
            text=True,
            timeout=SCRIPT_S,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return Facts(json.loads(done.stdout))

    return run


def _interpreter(environment: str) -> list[str]:
    folder = CLIENTS / environment
    if not (folder / ".installed").exists():
        pytest.skip(f"{environment} is not installed: make test-clients")
    return ["node"] if environment == "node" else [str(folder / "bin" / "python")]
