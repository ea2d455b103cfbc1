"""The flight recorder of a real server: what its engine decided, for whoever may see it."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx

from banyan.cli.client import Client
from banyan.cli.replay import replay, resend
from banyan.sim.replay import check
from tests.system.serving import CALL_S, ROOT, Server
from tests.system.test_journal import mixed_request

KEYS = ("--api-key", "sk-user", "--admin-api-key", "sk-admin")


def fetch(running: Server, key: str, **query: int) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return running.http.get("/flight_recorder", headers=headers, params=query)


def explaining(running: Server, request: str, key: str = "sk-admin"):
    command = [sys.executable, "-m", "banyan", "explain", request, "--url", running.url]
    return subprocess.run(
        [*command, "--api-key", key], cwd=ROOT, capture_output=True, text=True, timeout=CALL_S
    )


def test_an_administrator_gets_what_was_decided_and_it_replays(server, tmp_path):
    flags = ("--max-total-tokens", "640", "--schedule-conservativeness", "0")
    with server(*flags, *KEYS) as running:

        def ask(what: int | dict) -> int:
            path, body = mixed_request(what) if isinstance(what, int) else ("/generate", what)
            headers = {"Authorization": "Bearer sk-user"}
            return running.http.post(path, json=body, headers=headers).status_code

        watched = {
            "rid": "watched-request",
            "input_ids": [*range(2, 22)],
            "sampling_params": {"ignore_eos": True},
        }
        with ThreadPoolExecutor(12) as pool:  # all at once, so that pages run short
            asked = [pool.submit(ask, watched), *(pool.submit(ask, i) for i in range(1, 12))]
            early = fetch(running, "sk-admin")  # while it is written
            assert [one.result() for one in asked] == [200] * 12
        late = fetch(running, "sk-admin")
        assert fetch(running, "sk-user").status_code in (401, 403)
        assert fetch(running, "sk-admin", dp_rank=1).status_code == 400
        (tmp_path / "recording").write_bytes(late.content)
        again = resend(str(tmp_path / "recording"), Client(running.url, "sk-user"))
        warm_up = 1
        assert (again.sent, again.answered) == (12 + warm_up, 12 + warm_up), again
        reported = explaining(running, "watched-request")
        assert reported.returncode == 0, reported.stderr
        assert re.search("prompt +20 tokens, [0-9]+ of them from the cache", reported.stdout)
        assert reported.stdout.splitlines()[-1].split() == ["end", "length"]
        refused = explaining(running, "watched-request", key="sk-user")
        assert refused.returncode and "watched-request" not in refused.stdout
    plans = []
    for answer in (early, late):
        assert answer.status_code == 200, answer.text
        (tmp_path / "recording").write_bytes(answer.content)
        report = check(str(tmp_path / "recording"))
        assert report.ok, report
        plans.append(report.plans)
    assert plans[0] <= plans[1] and plans[1] > 20


def test_nothing_is_recorded_where_that_is_asked_for(server):
    with server("--flight-recorder-bytes", "0") as running:
        answer = running.http.get("/flight_recorder")
        assert answer.status_code == 404 and "--flight-recorder-bytes" in answer.text


LONG = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "description": "x" * 1200}
CONSTRAINTS = (
    {"regex": "(ab|cd){4}"},
    {"ebnf": 'root ::= ("yes" | "no") " and " ("yes" | "no")'},
    {"json_schema": json.dumps(LONG)},
)


class Listening(Client):
    """Keeps the constrained texts that it is answered."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.texts: list[str] = []

    def post(self, path, body):
        answer = super().post(path, body)
        if body["sampling_params"].keys() & {"regex", "ebnf", "json_schema"}:
            self.texts.append(json.loads(answer)["text"])
        return answer


def test_constrained_requests_are_sent_again_with_their_constraints(server, tmp_path):
    with server() as running:
        texts = []
        for constraint in CONSTRAINTS:
            params = {"max_new_tokens": 40, "temperature": 0.8, "sampling_seed": 7, **constraint}
            texts.append(running.generate(input_ids=[5, 6], sampling_params=params)["text"])
        (tmp_path / "recording").write_bytes(running.http.get("/flight_recorder").content)
        recording = str(tmp_path / "recording")
        assert "constrained" in check(recording).difference
        model = running.facts()["model_path"]
        assert replay([recording, "--check", model]) == 0
        client = Listening(running.url)
        again = resend(str(tmp_path / "recording"), client)
    assert again.answered == again.sent and not again.left_out, again
    assert sorted(client.texts) == sorted(texts) and len(set(texts)) == 3
