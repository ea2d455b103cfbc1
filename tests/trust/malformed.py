"""Ten thousand requests that are wrong somewhere, and those that a tester of OpenAPI documents
makes of ours: no answer is a failure of the server, none is late, and nobody else notices.

MALFORMED says how many (10,000). Left out are routes that, when they work, change what all others
get: they abort, pause, let go of memory or take other weights, which is what they are for.
"""

import asyncio
import json
import os
import random
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from banyan.server.http import auth
from banyan.server.routes import all_routes
from tests.system.serving import ROOT, Server, status_of
from tests.system.watch import Canary, Seen, watched

NUMBER = int(os.environ.get("MALFORMED", "10000"))
SCHEMATHESIS = ROOT / ".clients/schemathesis/bin/schemathesis"
EXAMPLES = 20
"""That it makes of each operation, beside those that cover the document."""
LATE_S = 30.0
MAX_BLOCKED_S = 0.5
DELIBERATE = (501, 503)
OF_ALL = (
    *("/abort_request", "/pause_generation", "/release_memory_occupation"),
    *("/update_weights_from_disk", "/update_weight_version", "/start_profile"),
)
CONCURRENCY = 16
CHAT = {"model": "x", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CORPUS: tuple[tuple[str, dict], ...] = (
    ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 2, "stop": ["x"]}}),
    ("/generate", {"input_ids": [5, 6, 7], "stream": True, "return_logprob": True, "rid": "r"}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "logprobs": 2}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3, "stream": True, "regex": "[ab]{3}"}),
    ("/v1/chat/completions", CHAT | {"temperature": 0.5, "seed": 3, "top_logprobs": 2}),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "auto", "stream": True}),
    (
        "/v1/chat/completions",
        CHAT
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            }
        },
    ),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}], "max_output_tokens": 2}),
    ("/v1/messages", {"model": "x", "max_tokens": 2, "messages": CHAT["messages"]}),
    ("/api/chat", CHAT | {"stream": False, "options": {"num_predict": 2}}),
    ("/api/generate", {"model": "x", "prompt": "a", "options": {"num_predict": 2, "top_k": 3}}),
    ("/v1/score", {"model": "x", "query": "q", "items": ["a"], "label_token_ids": [5, 6]}),
    ("/v1/embeddings", {"model": "x", "input": ["a", "b"]}),
    ("/tokenize", {"prompt": ["a", "b"]}),
    ("/detokenize", {"tokens": [[5, 6], [7]]}),
    ("/open_session", {"capacity_of_str_len": 10, "session_id": "s"}),
    ("/parse_function_call", {"text": "<tool_call>", "tools": [TOOL], "tool_call_parser": "qwen"}),
    ("/v1/batches", {"input_file_id": "file-1", "endpoint": "/v1/chat/completions"}),
    ("/load_lora_adapter", {"lora_name": "a", "lora_path": "../../etc"}),
    ("/configure_logging", {"log_requests_level": 1}),
)
HOSTILE: tuple[object, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 0.5, 1e308, -0.0),
    *(
        "",
        "a",
        "\0",
        "\ud800",
        "x" * 5000,
        "../../etc/passwd",
        "<|im_end|>",
        "{{ self }}",
        "é" * 99,
    ),
    *([], {}, [None], [[]], [[[[]]]], {"": None}, {"a": {"a": {"a": 1}}}, ["a"] * 300, [5] * 3000),
    *("(a+)+$", "[", "file:///etc/passwd", "http://169.254.169.254/", {"$ref": "#"}, "nan", 2**53),
)


@dataclass
class Tally:
    """What came back."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    def saw(self, status: int, took_s: float, what: str) -> None:
        self.statuses[status] += 1
        self.longest_s = max(self.longest_s, took_s)
        if status == 0 or status >= 500 and status not in DELIBERATE:
            self.faults.append(f"{status} to {what}")

    @property
    def reported(self) -> str:
        return ", ".join(f"{n:,} × {status}" for status, n in sorted(self.statuses.items()))


def spots(value: object, path: tuple = ()) -> list[tuple]:
    """Where something else could stand."""
    found = [path] if path else []
    members = value.items() if isinstance(value, dict) else ()
    members = enumerate(value) if isinstance(value, list) else members
    for key, inner in members:
        found += spots(inner, (*path, key))
    return found


def with_other(value: object, path: tuple, other: object) -> object:
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)  # type: ignore[call-overload]
    inner = with_other(copy[path[0]], path[1:], other) if path[1:] else other
    copy[path[0]] = inner
    return copy


def damaged(body: bytes, dice: random.Random) -> bytes:
    """A few bytes changed, taken away, or put in once more."""
    out = bytearray(body)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(out) + 1)
        match dice.randrange(4):
            case 0:
                out[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                del out[at : at + dice.randint(1, 8)]
            case 2:
                out[at:at] = out[at : at + dice.randint(1, 40)]
            case 3:
                out[at:at] = dice.choice((b"{", b"[", b'"', b"\\u0000", b"1e999", b",", b"null"))
    return bytes(out)


def made(dice: random.Random, posts: list[str]) -> tuple[str, bytes]:
    """A request that was right before something was done to it."""
    path, body = dice.choice(CORPUS)
    if dice.random() < 0.1:
        path = dice.choice(posts)  # whatever another route makes of it
    for _ in range(dice.randint(1, 2)):
        places = spots(body) or [()]
        body = with_other(body, dice.choice(places), dice.choice(HOSTILE))
        if not isinstance(body, dict):
            break
    if isinstance(body, dict) and dice.random() < 0.2:
        body = {**body, dice.choice(("n", "stop", "top_k", "tools", "x")): dice.choice(HOSTILE)}
    raw = json.dumps(body).encode()
    return path, damaged(raw, dice) if dice.random() < 0.4 else raw


async def mutations(server: Server, tally: Tally) -> None:
    dice = random.Random(3)
    posts = sorted(
        r.path
        for r in all_routes()
        if "POST" in r.methods and r.path not in OF_ALL and r.guard != auth.ADMIN
    )
    requests = iter([made(dice, posts) for _ in range(NUMBER)])
    headers = {"content-type": "application/json"}

    async def send() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=LATE_S) as client:
            for path, body in requests:
                began = time.monotonic()
                try:
                    status = (await client.post(path, content=body, headers=headers)).status_code
                except httpx.HTTPError as error:
                    status, body = 0, repr(error).encode() + b" " + body
                tally.saw(status, time.monotonic() - began, f"{path} {body[:300]!r}")

    await asyncio.gather(*(send() for _ in range(CONCURRENCY)))


def document(server: Server, folder: Path, tally: Tally) -> None:
    """What schemathesis makes of /openapi.json; its own verdicts on 501 are not asked for."""
    record = folder / "run.har"
    command = [
        *(str(SCHEMATHESIS), "run", f"{server.url}/openapi.json", "--phases", "coverage,fuzzing"),
        *("--checks", "not_a_server_error", "--continue-on-failure", "--no-shrink"),
        *("-w", "2", "-n", str(EXAMPLES), "--seed", "1", "--request-timeout", f"{LATE_S:g}"),
        *("--exclude-path-regex", "|".join(OF_ALL), "--generation-database", "none"),
        *("--report", "har", "--report-har-path", str(record), "--no-color", "--warnings", "off"),
    ]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    for entry in json.loads(record.read_text())["log"]["entries"]:
        asked, answer = entry["request"], entry["response"]
        reported = f"{asked['method']} {asked['url']} {str(asked.get('postData'))[:300]}"
        tally.saw(answer["status"], entry["time"] / 1000, reported)


def test_nothing_that_is_wrong_in_a_request_is_a_failure_of_the_server(server, tmp_path):
    if not SCHEMATHESIS.exists():
        pytest.skip(f"{SCHEMATHESIS} is not there: make .clients/schemathesis/.installed")
    mutated, documented = Tally(), Tally()
    with server("--file-storage-path", str(tmp_path / "kept"), "--log-level", "error") as running:
        canary = Canary(running)
        with watched(running) as seen:
            asyncio.run(mutations(running, mutated))
            document(running, tmp_path, documented)
        status, leaked = status_of(running, "/health"), running.stats()["leaked"]
        print_figures(mutated, documented, seen, canary)
        canary.end()
    assert status == 200 and leaked == 0
    assert not mutated.faults, mutated.faults[:5]
    assert not documented.faults, documented.faults[:5]
    assert seen.blocked_s < MAX_BLOCKED_S


def print_figures(mutated: Tally, documented: Tally, seen: Seen, canary: Canary) -> None:
    print(
        f"\nfigure: {sum(mutated.statuses.values()):,} mutated requests ({mutated.reported}) and "
        f"{sum(documented.statuses.values()):,} of schemathesis ({documented.reported}): "
        f"{len(mutated.faults) + len(documented.faults)} failures of the server, the longest "
        f"answer after {max(mutated.longest_s, documented.longest_s):.1f} s; /livez blocked for "
        f"{seen.blocked_s * 1000:.0f} ms at most; {len(canary.songs)} right answers to others"
    )
