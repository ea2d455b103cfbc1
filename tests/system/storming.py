"""Requests of every kind over raw sockets: some leave in the middle, some are aborted, some have a
deadline, and the rest must get what they get alone."""

import asyncio
import json
import random
from dataclasses import dataclass

from tests.system.serving import CALL_S

KINDS = 24
"""Different prompts, which share prefixes."""
FEW_BYTES = 6000
"""Disconnects fall within this many bytes of the answer."""
SOON_S = 0.5
"""Aborts and deadlines fall within this time."""
CHOICES = [f"banyan {i}" for i in range(40)]


@dataclass(frozen=True)
class Ask:
    """One request of the storm."""

    path: str
    body: dict
    cut_at: int | None = None
    """Disconnect after so many bytes of the answer; None = stay."""
    abort_s: float | None = None
    """Abort it by its id after so long."""
    deadline_s: float | None = None
    """End it by its own deadline."""

    @property
    def key(self) -> str:
        """Requests with the same key have the same text."""
        asked = {k: v for k, v in self.body.items() if k not in ("stream", "n", "rid")}
        if "sampling_params" in asked:
            params = {k: v for k, v in asked["sampling_params"].items() if k != "n"}
            asked["sampling_params"] = params
        return f"{self.path} {json.dumps(asked, sort_keys=True)}"

    @property
    def stays(self) -> bool:
        return self.cut_at is None and self.abort_s is None and self.deadline_s is None

    def alone(self) -> "Ask":
        """The same text, asked for once, whole, by somebody who stays."""
        body = {k: v for k, v in self.body.items() if k not in ("n", "rid")}
        if "sampling_params" in body:
            body["sampling_params"] = {**body["sampling_params"], "n": 1}
        return Ask(self.path, body | {"stream": False})


@dataclass(frozen=True)
class Shares:
    """Of the requests: who leaves, who is aborted, who has a deadline."""

    disconnects: float = 0.2
    aborts: float = 0.05
    deadlines: float = 0.05


def make(i: int, dice: random.Random, shares: Shares) -> Ask:
    kind = dice.randrange(KINDS)
    prompt, tokens = "The banyan " * (1 + kind) + str(kind), 8 + 2 * kind
    is_stream, answers = dice.random() < 0.5, dice.choice((1, 1, 1, 2, 4))
    bound = {"regex": "|".join(CHOICES)} if dice.random() < 0.1 else {}
    fate, at = dice.random(), dice.random()
    cut_at = int(FEW_BYTES * at) if fate < shares.disconnects else None
    fate -= shares.disconnects
    abort_s = SOON_S * at if 0 <= fate < shares.aborts else None
    fate -= shares.aborts
    deadline_s = 0.001 + SOON_S * at if 0 <= fate < shares.deadlines else None
    if i % 2 or abort_s is not None:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": not bound}
        params |= bound | {"n": answers}
        body = {"text": prompt, "sampling_params": params, "stream": is_stream}
        if abort_s is not None:
            body["rid"] = f"storm-{i}-{dice.getrandbits(64)}"
        return Ask("/generate", body, cut_at, abort_s, deadline_s)
    body = {"model": "tiny", "temperature": 0, "max_tokens": tokens, "ignore_eos": not bound}
    body |= bound | {"prompt": prompt, "stream": is_stream, "n": answers}
    return Ask("/v1/completions", body, cut_at, abort_s, deadline_s)


async def ask(port: int, request: Ask) -> str | None:
    """Text of the answer; None of a request that was not to stay."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_posted(request.path, request.body, request.deadline_s))
        if request.cut_at is not None:
            with_bytes = 0
            while with_bytes < request.cut_at and (part := await reader.read(256)):
                with_bytes += len(part)
            writer.transport.abort()
            return None
        if request.abort_s is not None:
            await asyncio.gather(reader.read(), _abort(port, request))
            return None
        raw = await reader.read()
        assert raw, "an answer without a byte"
        return text_of(request, raw) if request.stays else None
    finally:
        writer.close()


async def _abort(port: int, request: Ask) -> None:
    await asyncio.sleep(request.abort_s or 0.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_posted("/abort_request", {"rid": request.body["rid"]}, None))
    assert b" 200 " in (await reader.read()).split(b"\r\n")[0]
    writer.close()


def _posted(path: str, body: dict, deadline_s: float | None) -> bytes:
    encoded = json.dumps(body).encode()
    until = f"x-request-timeout: {deadline_s:.3f}\r\n" if deadline_s is not None else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{until}"
        f"Content-Type: application/json\r\nContent-Length: {len(encoded)}\r\n\r\n"
    )
    return head.encode() + encoded


def text_of(request: Ask, raw: bytes) -> str:
    """The text that all its answers have."""
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], raw[:500]
    if b"transfer-encoding: chunked" in head.lower():
        body = unchunk(body)
    texts = _streamed(request, body) if request.body["stream"] else _whole(body)
    params = request.body.get("sampling_params", request.body)
    assert len(texts) == params.get("n", 1), f"{len(texts)} answers to {request.key}"
    assert len(set(texts)) == 1, f"different answers to {request.key}: {texts}"
    return texts[0]


def _whole(body: bytes) -> list[str]:
    answer = json.loads(body)
    if isinstance(answer, list):
        return [one["text"] for one in answer]
    return [answer["text"]] if "text" in answer else [c["text"] for c in answer["choices"]]


def _streamed(request: Ask, body: bytes) -> list[str]:
    lines = [x.removeprefix("data: ") for x in body.decode().split("\n\n") if x]
    assert lines[-1] == "[DONE]", lines[-1]
    texts: dict[int, str] = {}
    for event in map(json.loads, lines[:-1]):
        if request.path == "/generate":
            texts[event.get("index", 0)] = event["text"]  # cumulative
            continue
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return list(texts.values())


def unchunk(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(rest[:length])
        body = rest[length + 2 :]
    return b"".join(parts)


async def storm(port: int, requests: list[Ask], concurrency: int) -> list[str | None]:
    """All of them, so many at a time, each within the time of a call."""
    gate = asyncio.Semaphore(concurrency)

    async def one(request: Ask) -> str | None:
        async with gate:
            return await asyncio.wait_for(ask(port, request), CALL_S)

    return await asyncio.gather(*(one(r) for r in requests))
