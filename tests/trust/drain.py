"""A server that is asked to end while a hundred streams run."""

import asyncio
import json
import signal
import time

import httpx

from tests.support.streams import ENDLESS
from tests.system.serving import CALL_S, wait_until

STREAMS = 100
TOKENS = 1500
REFUSED = {"text": "a", "sampling_params": {"max_new_tokens": 1}}


async def stream(url: str, number: int, ends: list[dict]) -> None:
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": [5 + number, 6, 7], "sampling_params": params, "stream": True}
    last = ""
    async with (
        httpx.AsyncClient(timeout=CALL_S * 2) as client,
        client.stream("POST", f"{url}/generate", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                last = line
            elif line == "data: [DONE]":
                ends.append(json.loads(last.removeprefix("data: ")))


def test_no_stream_is_cut_when_a_server_ends(server):
    ends: list[dict] = []
    refused: list[httpx.Response] = []
    ready: list[int] = []

    async def load(running) -> None:
        streams = [asyncio.create_task(stream(running.url, i, ends)) for i in range(STREAMS)]
        await asyncio.to_thread(
            wait_until, lambda: running.stats()["running"] > 10, CALL_S, "the streams to run"
        )
        running.signal(signal.SIGTERM)
        async with httpx.AsyncClient(base_url=running.url, timeout=CALL_S) as client:
            while not refused:
                answer = await client.post("/generate", json=REFUSED)
                if answer.status_code != 200:
                    refused.append(answer)
                    ready.append((await client.get("/readyz")).status_code)
        await asyncio.gather(*streams)

    with server("--drain-timeout", "120", *ENDLESS) as running:
        asyncio.run(load(running))
        began = time.monotonic()
        code = running.exit_code(30.0)
        left = running.members()
    answered = [end["meta_info"] for end in ends if "meta_info" in end]
    whole = sum(facts["completion_tokens"] == TOKENS for facts in answered)
    print(
        f"\nfigure: {whole} of {STREAMS} streams complete; new requests {refused[0].status_code}, "
        f"Retry-After {refused[0].headers.get('retry-after')}; /readyz {ready[0]}; exit code "
        f"{code} "
        f"{time.monotonic() - began:.1f} s after the last; {len(left)} processes left"
    )
    assert whole == STREAMS and code == 0 and not left
    assert refused[0].status_code == 503 and refused[0].headers["retry-after"].isdigit()
    assert ready == [503]
