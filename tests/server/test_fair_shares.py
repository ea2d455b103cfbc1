"""One caller floods whatever is bounded; another is served all the same."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan.base.clock import VirtualClock
from banyan.base.errors import RequestError
from banyan.base.fair_share import CALLER, FairShare
from banyan.base.ids import RequestId
from banyan.messages.events import Finished
from banyan.messages.requests import Generate
from banyan.messages.sampling_params import SamplingParams
from banyan.requests import sessions
from banyan.requests.sessions import Sessions
from banyan.router.config import LimitConfig
from banyan.router.state import AdmissionLimiter
from banyan.server.http.limits import ReceivedBody
from banyan.server.store import batches as batch_store
from banyan.server.store import files, responses
from banyan.server.store.batches import StoredBatch
from banyan.server.store.responses import ResponseStore, StoredResponse
from banyan.server.store.storage import Storage
from tests.scheduler.driver import Driver, continuation
from tests.server.fakes import Site
from tests.support.fake_engine import serving
from tests.support.flags import config_of
from tests.system.serving import wait_until

FLOOD, NEXT = b"flood", b"next"


def generate(id: str, caller: bytes) -> Generate:
    sampling = SamplingParams(max_new_tokens=8)
    return Generate(request=RequestId(id), tokens=b"\1\0\0\0", sampling=sampling, caller=caller)


def response(id: str, owner: bytes, status: str = "completed") -> StoredResponse:
    return StoredResponse(lambda: {"status": status, "output": []}, id, [], [], owner)


@pytest.mark.parametrize("status", ["completed", "in_progress"])
def test_stored_responses(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    monkeypatch.setattr(responses, "MAX_RESPONSES", 16)
    store = ResponseStore()
    store.keep(response("mine", NEXT))
    refused = 0
    for number in range(40):
        try:
            store.keep(response(f"r{number}", FLOOD, status))
        except RequestError:
            refused += 1
    assert len(store) <= 16 and bool(refused) == (status == "in_progress")
    store.keep(response("later", NEXT, status))
    assert store.has("mine", NEXT) and store.has("later", NEXT)


def test_bytes_of_stored_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_BYTES", 4000)
    store = ResponseStore()
    store.keep(response("mine", NEXT))
    for number in range(200):
        store.keep(response(f"r{number}", FLOOD))
    assert store.has("mine", NEXT) and len(store) < 100


def test_sessions_whatever_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 16)
    found = Sessions(VirtualClock())
    with pytest.raises(RequestError, match="16 of 16 sessions are yours"):
        for _ in range(40):
            found.open(100, timeout_s=1e8, tenant=FLOOD)
    mine = [found.open(100, tenant=NEXT) for _ in range(4)]
    assert all(found.close(name, NEXT) for name in mine)


def flood_files(storage: Storage, content: bytes) -> int:
    async def play() -> int:
        for number in range(200):
            try:
                await storage.files.add("f", "batch", content, FLOOD.hex())
            except RequestError as error:
                assert error.status == 507 and "yours" in error.text
                await storage.files.add("mine", "batch", content, NEXT.hex())
                return number
        raise AssertionError("there is no limit")

    return asyncio.run(play())


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 16)
    assert flood_files(Storage(tmp_path).open(), b"x") == 14


def test_bytes_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_TOTAL_BYTES", 1600)
    assert flood_files(Storage(tmp_path).open(), b"x" * 100) == 14


def test_bodies_in_memory() -> None:
    memory = FairShare(800)
    held = [ReceivedBody(memory, FLOOD) for _ in range(20)]
    with pytest.raises(RequestError, match="of this caller"):
        for body in held:
            body.add(100)
    mine = ReceivedBody(memory, NEXT)
    mine.add(40)
    for body in (*held, mine):
        body.release()
    assert memory.total == 0


def test_waiting_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "MAX_BATCHES", 16)
    store = Storage(tmp_path).open().batches

    async def add(owner: bytes) -> None:
        await store.make_room(owner.hex())
        await store.save(
            StoredBatch(store.fresh_id(), "/v1", "i", "o", "e", "24h", 0, owner=owner.hex())
        )

    async def play() -> None:
        with pytest.raises(RequestError, match="of them yours"):
            for _ in range(40):
                await add(FLOOD)
        await add(NEXT)

    asyncio.run(play())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    flags = ["--api-key", "flood-key next-key", "--file-storage-path", str(tmp_path / "kept")]
    with Site(config_of(*flags).server).serving() as served:
        yield served
        served.call(served.state.storage.close)


def test_lines_of_batches(site: Site) -> None:
    begun: dict[str, str] = {}

    def start(key: str, count: int) -> None:
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": "tiny", "prompt": "Hi"}
        lines = [
            {"custom_id": f"l{i}", "method": "POST", "url": "/v1/completions", "body": body}
            for i in range(count)
        ]
        content = "\n".join(map(json.dumps, lines))
        upload = {"purpose": (None, "batch"), "file": ("f", content.encode())}
        file = site.http.post("/v1/files", files=upload, headers=headers).json()["id"]
        what = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        begun[key] = site.http.post("/v1/batches", json=what, headers=headers).json()["id"]

    def status(key: str) -> str:
        headers = {"authorization": f"Bearer {key}"}
        return site.http.get(f"/v1/batches/{begun[key]}", headers=headers).json()["status"]

    site.generator.hold_after = 1
    start("flood-key", 200)
    wait_until(lambda: bool(site.generator.asked), 60, "the flood to begin")
    site.generator.hold_after = None
    start("next-key", 1)
    wait_until(lambda: status("next-key") == "completed", 60, "the other batch to end")
    assert status("flood-key") == "in_progress"


@pytest.mark.parametrize("limit", ["max_open", "max_queued"])
def test_open_requests(limit: str) -> None:
    async def play() -> None:
        async with serving(lambda _: [], **{limit: 16}) as (client, _):
            with pytest.raises(RequestError) as caught:
                for number in range(40):
                    client.submit(generate(f"f{number}", caller=FLOOD))
            assert caught.value.code in ("queue_full", "too_many_requests")
            client.refuse_if_full(NEXT)
            client.submit(generate("mine", caller=NEXT))

    asyncio.run(play())


def test_the_queue_of_the_engine() -> None:
    running = Driver(max_running=1, max_queued=4)
    running.submit("busy", [1, 2, 3], new=20, caller=FLOOD)
    running.step()
    for number in range(10):
        running.submit(f"f{number}", [1, 2, 3], caller=FLOOD)
    for number in range(2):
        running.submit(f"n{number}", [4, 5, 6], caller=NEXT)
    running.run()
    ends = {name: type(end).__name__ for name, end in running.ends.items()}
    assert [ends[f"n{number}"] for number in range(2)] == ["Finished"] * 2
    assert sum(end == "Finished" for end in ends.values()) == 5


@pytest.mark.parametrize("depth", [1, 2])
def test_slots_of_the_engine(depth: int) -> None:
    running = Driver(max_running=4, depth=depth)
    prompts = {f"f{number}": [number, 2, 3] for number in range(12)}
    for name, prompt in prompts.items():
        running.submit(name, prompt, new=60, caller=FLOOD)
    for _ in range(5):
        running.step()
    for number in range(6):
        running.submit(f"n{number}", [4, 5, number], new=2, caller=NEXT)
    running.run()
    assert all(isinstance(end, Finished) for end in running.ends.values())
    order = list(running.ends)
    assert order.index("n0") < min(order.index(name) for name in prompts)
    assert sum(running.ends[name].retractions for name in prompts) <= 6
    for name, prompt in prompts.items():
        assert running.outputs[name] == continuation(prompt, 60)


@pytest.mark.parametrize(
    "limits", [LimitConfig(concurrent=16, waiting=16, waiting_s=5), LimitConfig(rate=16)]
)
def test_places_of_a_router(limits: LimitConfig) -> None:
    async def play() -> None:
        admission = AdmissionLimiter(limits, lambda: 0.0)
        over = asyncio.Event()
        refused: list[str] = []

        async def ask() -> None:
            try:
                async with admission.slot():
                    await over.wait()
            except RequestError as error:
                refused.append(error.code)

        CALLER.set(FLOOD)
        flood = [asyncio.create_task(ask()) for _ in range(60)]
        await asyncio.sleep(0)
        assert refused
        CALLER.set(NEXT)
        async with admission.slot():
            pass
        over.set()
        await asyncio.gather(*flood)
        assert admission.inside == admission.waiting == 0

    asyncio.run(play())


def test_texts_to_tokenize_are_bounded_in_all(site: Site) -> None:
    headers = {"authorization": "Bearer flood-key"}
    for count, status in ((5, 200), (6, 400)):
        body = {"prompt": ["x" * 100_000] * count}
        answer = site.http.post("/tokenize", json=body, headers=headers)
        assert answer.status_code == status, answer.text[:200]
