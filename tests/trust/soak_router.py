"""All routes through a router, for as long as it takes to see a slope: two servers, three keys,
clients that leave and abort, and an engine that is killed now and then.

ROUTED_MINUTES says how long (20), ROUTED_RPS how much (6), ROUTED_KILLS how often an engine of the
second server is killed (4). The first third is warm-up, 10 minutes at most. Memory is measured for
each process that lives throughout; the killed engines are not among them.
"""

import asyncio
import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.system.conftest import with_tiny_model
from tests.system.routing import routing
from tests.system.serving import Server, open_files, serving, settled, wait_until
from tests.trust.slope import slope
from tests.trust.soak import own_mb

MINUTES = float(os.environ.get("ROUTED_MINUTES", "20"))
RATE_RPS = float(os.environ.get("ROUTED_RPS", "6"))
KILLS = int(os.environ.get("ROUTED_KILLS", "4"))
WARM_UP_S = min(600.0, MINUTES * 20)
SAMPLE_S = 5.0
BLOCK_S = min(60.0, MINUTES * 3)
MOST_MB_PER_HOUR = float(os.environ.get("ROUTED_MB", "1"))
"""Of each process, above what the line's own uncertainty explains."""
PATIENCE_S = 120.0
SECRET, WORKER_KEY, ADMIN = "long random text of this test", "worker-key", "root-key"
KEYS = ("alice-key", "bob-key", "carol-key")
FILLED_SOON = ("--max-total-tokens", "4096", "--flight-recorder-bytes", "65536")
"""What is bounded has reached its bound when the warm-up ends."""
NO_THREAD_CACHES = "glibc.malloc.tcache_count=0"
"""What the C library keeps of freed memory for each thread fills slowly too, up to a bound."""
FAST = ("--health-check-interval-secs", "0.5", "--worker-startup-check-interval", "0.2")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass
class Seen:
    """What was sent, what came back, and how the processes looked meanwhile.

    Attributes:
        statuses: how many answers of each status, by path.
        wrong: answers that differ from earlier ones, or belong to another key.
        lost: requests without an answer.
        memory_mb: (time, megabytes) of each process, by its name.
    """

    statuses: dict[str, dict[int, int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    memory_mb: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    files: dict[str, list[int]] = field(default_factory=dict)

    def note(self, path: str, status: int) -> None:
        counts = self.statuses.setdefault(path.split("?")[0], {})
        counts[status] = counts.get(status, 0) + 1

    def check(self, key: str, text: str) -> None:
        if self.texts.setdefault(key, text) != text:
            self.wrong.append(f"{key}: {text[:80]!r} after {self.texts[key][:80]!r}")

    def of_status(self, least: int) -> int:
        return sum(
            n for by in self.statuses.values() for status, n in by.items() if status >= least
        )


def bodies(dice: random.Random) -> list[tuple[str, dict]]:
    """One request of each route that makes a text, all of them greedy."""
    kind = dice.randrange(24)
    text, count = "The banyan " * (1 + kind) + str(kind), 4 + kind
    said = [{"role": "user", "content": text}]
    greedy = {"model": "default", "temperature": 0, "max_tokens": count}
    params = {"max_new_tokens": count, "temperature": 0}
    options = {"num_predict": count, "temperature": 0}
    return [
        ("/generate", {"text": text, "sampling_params": params}),
        ("/v1/completions", {**greedy, "prompt": text}),
        ("/v1/chat/completions", {**greedy, "messages": said}),
        ("/v1/messages", {**greedy, "messages": said}),
        ("/api/generate", {"model": "default", "prompt": text, "options": options}),
        ("/tokenize", {"prompt": text}),
    ]


def text_of(body: bytes) -> str:
    """What must be the same each time; ids, times and counts of the cache are not."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            left = value.items()
            return {k: plain(v) for k, v in left if k in _TEXTS or isinstance(v, dict | list)}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return json.dumps(plain(json.loads(body)))


_TEXTS = ("text", "content", "response", "tokens", "count", "finish_reason", "stop_reason")


class Client:
    """The load of the three keys on one router."""

    def __init__(self, router: Server, seen: Seen) -> None:
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=16)
        self.http = httpx.AsyncClient(base_url=router.url, timeout=PATIENCE_S, limits=limits)
        self.seen, self.dice = seen, random.Random(7)

    async def one(self, number: int) -> None:
        """One request, or a few that belong together."""
        key = KEYS[number % 3]
        acts = (self.answer, self.answer, self.leave, self.abort, self.store, self.look)
        try:
            await acts[self.dice.randrange(len(acts))](key, number)
        except httpx.HTTPError as error:
            self.seen.lost.append(f"{type(error).__name__}: {error}")

    async def post(self, path: str, body: dict, key: str) -> httpx.Response:
        answer = await self.http.post(path, json=body, headers=bearer(key))
        self.seen.note(path, answer.status_code)
        return answer

    async def answer(self, key: str, number: int) -> None:
        path, body = self.dice.choice(bodies(self.dice))
        answer = await self.post(path, body | {"stream": False}, key)
        if answer.status_code == 200:
            self.seen.check(f"{path} {json.dumps(body)}", text_of(answer.content))

    async def leave(self, key: str, number: int) -> None:
        """Close a stream behind its first piece."""
        path, body = self.dice.choice(bodies(self.dice)[:5])
        ask = self.http.stream("POST", path, json=body | {"stream": True}, headers=bearer(key))
        async with ask as answer:
            self.seen.note(path, answer.status_code)
            async for _ in answer.aiter_bytes():
                break

    async def abort(self, key: str, number: int) -> None:
        rid = f"job-{number}"
        params = {"max_new_tokens": 900, "temperature": 0, "ignore_eos": True}
        body = {"text": "a", "rid": rid, "sampling_params": params}
        work = asyncio.create_task(self.post("/generate", body, key))
        other = KEYS[(number + 1) % 3]
        answer = await self.post("/abort_request", {"rid": rid}, other)
        for reply in answer.json().get("workers", []):
            if isinstance(reply.get("body"), dict) and reply["body"].get("aborted"):
                self.seen.wrong.append(f"{other} aborted a request of {key}")
        await self.post("/abort_request", {"rid": rid}, key)
        await work

    async def store(self, key: str, number: int) -> None:
        """A stored response is its key's alone."""
        asked = {"model": "default", "input": "hello", "max_output_tokens": 4, "temperature": 0}
        made = await self.post("/v1/responses", asked, key)
        if made.status_code != 200:
            return
        path = f"/v1/responses/{made.json()['id']}"
        for by in KEYS:
            found = await self.http.get(path, headers=bearer(by))
            self.seen.note("/v1/responses/ID", found.status_code)
            if by != key and found.status_code == 200:
                self.seen.wrong.append(f"{by} reads a response of {key}")
        await self.http.delete(path, headers=bearer(key))

    async def look(self, key: str, number: int) -> None:
        for path in ("/v1/models", "/livez", "/requests", "/health"):
            answer = await self.http.get(path, headers=bearer(key))
            self.seen.note(path, answer.status_code)


async def drive(router: Server, servers: list[Server], seen: Seen) -> int:
    """The load, a look at the processes every few seconds, and the kills."""
    client, dice, began = Client(router, seen), random.Random(11), time.monotonic()
    open_: set[asyncio.Task[None]] = set()
    look_s, sent = 0.0, 0
    kills = [MINUTES * 60 * (at + 1) / (KILLS + 1) for at in range(KILLS)]
    while (now_s := time.monotonic() - began) < MINUTES * 60:
        if now_s >= look_s:
            look_s = now_s + SAMPLE_S
            await asyncio.to_thread(look, router, servers, seen, now_s)
        if kills and now_s >= kills[0]:
            kills.pop(0)
            os.kill(servers[1].engine_pid(), signal.SIGKILL)
        task = asyncio.create_task(client.one(sent))
        open_.add(task)
        task.add_done_callback(open_.discard)
        sent += 1
        await asyncio.sleep(dice.expovariate(RATE_RPS))
    await asyncio.gather(*open_)
    await client.http.aclose()
    return sent


def look(router: Server, servers: list[Server], seen: Seen, now_s: float) -> None:
    pids = {"router": router.pid, "server 1": servers[0].pid, "server 2": servers[1].pid}
    pids["engine 1"] = servers[0].engine_pid()
    for name, pid in pids.items():
        seen.memory_mb.setdefault(name, []).append((now_s, own_mb(pid)))
        seen.files.setdefault(name, []).append(open_files(pid))


def blocks(samples: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Middle and mean of each block after the warm-up."""
    found: dict[int, list[tuple[float, float]]] = {}
    for at_s, memory in samples:
        if at_s >= WARM_UP_S:
            found.setdefault(int(at_s // BLOCK_S), []).append((at_s, memory))
    pairs = [tuple(sum(x) / len(x) for x in zip(*b, strict=True)) for b in found.values()]
    return [at for at, _ in pairs], [memory for _, memory in pairs]


def test_nothing_grows_and_nothing_is_mixed_up(
    tiny_model: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("BANYAN_DIST_SECRET", SECRET)
    monkeypatch.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", "60")
    monkeypatch.setenv("GLIBC_TUNABLES", NO_THREAD_CACHES)
    seen = Seen()
    flags = ("--api-key", WORKER_KEY, "--admin-api-key", ADMIN, "--random-seed", "7")
    flags = with_tiny_model((*flags, "--check-ledger"), tiny_model)
    flags = (*flags, *FILLED_SOON)
    keys = ("--api-key", " ".join(KEYS), "--admin-api-key", ADMIN)
    with (
        serving(tmp_path / "a.log", *flags) as first,
        serving(tmp_path / "b.log", *flags) as second,
    ):
        servers = [first, second]
        for server in servers:
            server.http.headers.update(bearer(WORKER_KEY))
        with routing(tmp_path / "router.log", *keys, *FAST, "--worker-urls", first.url) as router:
            router.http.headers.update(bearer(ADMIN))
            for server in servers:
                router.http.delete("/workers/" + server.url)
                added = {"url": server.url, "api_key": WORKER_KEY}
                answer = router.http.post("/workers", json=added)
                assert answer.status_code < 400, answer.text
            sent = asyncio.run(drive(router, servers, seen))
            for server in servers:
                wait_until(lambda s=server: s.http.get("/health").status_code == 200, 60, "health")
                stats = settled(server.stats, 0)
                assert stats["leaked"] == 0 == stats["held_pages"]
    lines = {name: slope(*blocks(samples)) for name, samples in seen.memory_mb.items()}
    last = {name: samples[-1][1] for name, samples in seen.memory_mb.items()}
    reported = ", ".join(
        f"{name} {line.per_hour:+.1f} ± {line.error:.1f} MB/h ({last[name]:.0f} MB)"
        for name, line in lines.items()
    )
    third = max(1, len(seen.files["router"]) // 3)
    files = {n: (min(f[third : 2 * third]), min(f[-third:])) for n, f in seen.files.items()}
    print(
        f"\nfigure: {MINUTES:g} min, {sent:,} sequences of three keys through a router, {KILLS} "
        f"engines killed; {seen.of_status(200) - seen.of_status(300):,} answers of 200, "
        f"{seen.of_status(500)} of 500 and above, {len(seen.lost)} lost, {len(seen.wrong)} wrong; "
        f"{reported}; descriptors {files}"
    )
    print({path: counts for path, counts in sorted(seen.statuses.items())})
    assert not seen.wrong, seen.wrong[:5]
    assert not seen.lost, seen.lost[:5]
    refused = {s for counts in seen.statuses.values() for s in counts} - {200, 204, 404}
    assert refused <= {503}, seen.statuses
    assert seen.of_status(500) <= 8 * KILLS * RATE_RPS, seen.statuses
    assert all(late <= early + 2 for early, late in files.values()), files
    assert all(n.per_hour - n.error < MOST_MB_PER_HOUR for n in lines.values()), lines
