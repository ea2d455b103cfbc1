"""A storm of requests with disconnects at random bytes leaves nothing behind, and the answers of
those who stay are what they get alone."""

import asyncio
import json
import random
from dataclasses import dataclass

import pytest

from tests.system.serving import CALL_S, Server, open_files, wait_until

REQUESTS, CONCURRENCY, DISCONNECTS = 500, 64, 0.2
KINDS = 24
"""Different prompts, which share prefixes."""
FEW_BYTES = 6000
"""Disconnects fall within this many bytes of the answer."""


@dataclass(frozen=True)
class Ask:
    """One request of the storm."""

    path: str
    body: dict
    cut_at: int | None
    """Disconnect after so many bytes of the answer; None = stay."""

    @property
    def key(self) -> str:
        """Requests with the same key have the same text."""
        return f"{self.path.split('/')[-1]} {self.body.get('prompt') or self.body.get('text')}"


def make(i: int, dice: random.Random) -> Ask:
    kind = dice.randrange(KINDS)
    prompt, tokens = "The banyan " * (1 + kind) + str(kind), 8 + 2 * kind
    is_stream = dice.random() < 0.5
    cut_at = dice.randrange(FEW_BYTES) if dice.random() < DISCONNECTS else None
    if i % 2:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return Ask(
            "/generate", {"text": prompt, "sampling_params": params, "stream": is_stream}, cut_at
        )
    body = {"model": "tiny", "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return Ask("/v1/completions", body | {"prompt": prompt, "stream": is_stream}, cut_at)


async def ask(port: int, request: Ask) -> str | None:
    """Text of the answer; None after a disconnect."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(request.body).encode()
    head = (
        f"POST {request.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    try:
        if request.cut_at is not None:
            with_bytes = 0
            while with_bytes < request.cut_at and (part := await reader.read(256)):
                with_bytes += len(part)
            writer.transport.abort()
            return None
        return text_of(request, await reader.read())
    finally:
        writer.close()


def text_of(request: Ask, raw: bytes) -> str:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], raw[:500]
    if b"transfer-encoding: chunked" in head.lower():
        body = unchunk(body)
    if not request.body["stream"]:
        answer = json.loads(body)
        return answer["text"] if "text" in answer else answer["choices"][0]["text"]
    lines = [x.removeprefix("data: ") for x in body.decode().split("\n\n") if x]
    assert lines[-1] == "[DONE]", lines[-1]
    events = [json.loads(x) for x in lines[:-1]]
    if request.path == "/generate":
        return events[-1]["text"]  # cumulative
    return "".join(c["text"] for e in events for c in e["choices"])


def unchunk(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(rest[:length])
        body = rest[length + 2 :]
    return b"".join(parts)


async def storm(port: int, requests: list[Ask]) -> list[str | None]:
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(request: Ask) -> str | None:
        async with gate:
            return await asyncio.wait_for(ask(port, request), CALL_S)

    return await asyncio.gather(*(one(r) for r in requests))


def is_at_rest(server: Server) -> bool:
    stats = server.stats()
    return stats["running"] == stats["waiting"] == stats["in_flight_pages"] == 0


@pytest.mark.slow
def test_a_disconnect_storm_leaves_nothing_behind_and_disturbs_nobody(server):
    dice = random.Random(20)
    requests = [make(i, dice) for i in range(REQUESTS)]
    with server("--max-running-requests", "24", "--check-ledger") as running:
        solo = {}
        for request in requests:
            if request.key not in solo:
                body = request.body | {"stream": False}
                alone = Ask(request.path, body, None)
                solo[request.key] = asyncio.run(ask(running.port, alone))
        running.http.close()
        running.http = type(running.http)(base_url=running.url, timeout=CALL_S)
        wait_until(lambda: is_at_rest(running), 10.0, "rest before the storm")
        before = {p: open_files(p) for p in (running.pid, running.engine_pid())}
        tasks = running.facts()["server_tasks"]

        texts = asyncio.run(storm(running.port, requests))

        wait_until(lambda: is_at_rest(running), 10.0, "rest after the storm")
        wait_until(
            lambda: all(open_files(p) <= n for p, n in before.items()),
            10.0,
            f"descriptors to fall back to {before}",
        )
        wait_until(
            lambda: running.facts()["server_tasks"] <= tasks,
            10.0,
            f"server tasks to fall back to {tasks}",
        )
        stats = running.stats()
        assert stats["held_pages"] == 0
        assert stats["free_pages"] + stats["cached_pages"] == stats["total_pages"]
        assert stats["leaked"] == 0 and stats["failed"] == 0
        assert "ledger" not in running.log.read_text()
        survivors = [(r, t) for r, t in zip(requests, texts, strict=True) if t is not None]
        assert len(survivors) > REQUESTS * (1 - DISCONNECTS) - 60
        wrong = [r.key for r, text in survivors if text != solo[r.key]]
        assert not wrong, f"{len(wrong)} of {len(survivors)}: {wrong[:3]}"
