"""The processes that tokenize texts, render templates and compile grammars, killed or stopped: the
request that finds out may fail, the next ones do not, and the server stays ready.

HELPER_FAULTS says how often each kind is killed (20); it is stopped a tenth as often, which takes
as long as the limit of the work.
"""

import itertools
import os
import signal
import time

import httpx
import pytest

from tests.system.serving import CALL_S, Server, status_of, wait_until

KILLS = int(os.environ.get("HELPER_FAULTS", "20"))
KINDS = {
    "tokenize": "banyan.tokenizer.encode_worker",
    "render": "banyan.chat_template.worker",
    "compile": "banyan.grammar.worker",
}
MOST_S = {signal.SIGKILL: 10.0, signal.SIGSTOP: 60.0}


def chat(server: Server, number: int) -> httpx.Response:
    """A request that needs all three: its schema is one that nobody has compiled yet."""
    shape = {"type": "object", "properties": {f"a{number}": {"type": "boolean"}}}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": shape}}
    message = {"role": "user", "content": f"hello {number}"}
    body = {"model": "x", "messages": [message], "max_tokens": 3, "response_format": form}
    return server.http.post("/v1/chat/completions", json=body, timeout=CALL_S * 2)


@pytest.mark.parametrize("number", MOST_S, ids=lambda number: number.name)
@pytest.mark.parametrize("kind", KINDS)
def test_a_helper_that_is_lost_is_replaced_and_the_server_stays_ready(server, kind, number):
    failures: list[int] = []
    took_s: list[float] = []
    asked = itertools.count()
    faults = KILLS if number == signal.SIGKILL else max(1, KILLS // 10)
    with server("--tokenizer-worker-num", "2") as running:
        assert chat(running, next(asked)).status_code == 200
        engine = running.engine_pid()
        for _ in range(faults):
            wait_until(lambda: running.children_of(KINDS[kind]) != [], CALL_S, "a helper")
            struck = running.children_of(KINDS[kind])
            for pid in struck:
                os.kill(pid, number)
            began = time.monotonic()
            assert status_of(running, "/readyz") == 200
            while (answer := chat(running, next(asked))).status_code != 200:
                failures.append(answer.status_code)
                assert time.monotonic() - began < MOST_S[number], answer.text
            took_s.append(time.monotonic() - began)
            assert (
                not set(struck) & set(running.children_of(KINDS[kind])) or number == signal.SIGSTOP
            )
        assert running.engine_pid() == engine, "the engine was replaced"
        assert running.stats()["leaked"] == 0 and running.stats()["held_pages"] == 0
    print(
        f"\nfigure: {kind}: {number.name} × {faults}: served again after {max(took_s):.1f} s at "
        f"most; {len(failures)} requests failed ({sorted(set(failures)) or 'none'})"
    )
    assert max(took_s) < MOST_S[number] and len(failures) <= 2 * faults
