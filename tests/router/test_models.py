"""Several models behind one router: loaded when they are asked, unloaded for others, never lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from banyan.base.child_process import Child
from banyan.base.errors import ConfigError, DeviceError
from banyan.cli.router import read_flags
from banyan.cli.serve import several_models
from banyan.config.env import Environment
from banyan.router import models as module
from banyan.router.config import ModelsConfig, PoolConfig, RouterConfig, WorkerSpec
from banyan.router.models import ModelServers, NamedModel, State
from tests.router.fakes import (
    BASE,
    STREAM_HEAD,
    FakeWorker,
    Request,
    Routed,
    chunk,
    router,
    until,
    whole,
)

pytestmark = pytest.mark.asyncio
GIB = 1 << 30


class FakeChild:
    """A server's process."""

    pid = 0

    def __init__(self, is_alive: bool = True) -> None:
        self.alive = is_alive

    def is_alive(self) -> bool:
        return self.alive

    def stop(self, grace_s: float) -> None:
        self.alive = False


class Machine:
    """A `ModelHost` whose servers are sockets of the test. Counts what runs at a time."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.workers: dict[str, FakeWorker] = {}
        self.children: dict[str, FakeChild] = {}
        self.started: list[str] = []
        self.most = 0
        self.limits: dict[str, int] = {}
        self.broken: set[str] = set()
        self.hub: list[tuple[str, str]] = []
        self.go = asyncio.Event()
        """Streams end once it is set."""

    def find(self) -> list[NamedModel]:
        return [NamedModel(name, (f"/{name}",), size) for name, size in self.sizes.items()]

    def start(self, source: NamedModel, limit_bytes: int) -> tuple[Child, WorkerSpec]:
        if source.name in self.broken:
            raise DeviceError("no such file")
        child = self.children[source.name] = FakeChild()
        self.started.append(source.name)
        self.limits[source.name] = limit_bytes
        self.most = max(self.most, sum(c.alive for c in self.children.values()))
        return child, WorkerSpec(self.workers[source.name].url)  # type: ignore[return-value]

    async def change_hub(self, verb: str, name: str) -> str:
        self.hub.append((verb, name))
        if verb == "pull":
            self.sizes[name] = 0
        else:
            del self.sizes[name.removeprefix("/")]
        return ""

    def says(self, name: str):
        async def say(
            request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            if request.path == "/v1/models":
                listing = b'{"data": [{"id": "%b"}, {"id": "%b-adapter"}]}'
                writer.write(whole(listing % (name.encode(), name.encode())))
            elif request.fields.get("stream"):
                writer.write(STREAM_HEAD + chunk(b"data: 1\n\n"))
                await self.go.wait()
                writer.write(chunk(b"data: %b\n\n" % name.encode()) + b"0\r\n\r\n")
            else:
                writer.write(whole(b'{"by": "%b"}' % name.encode()))

        return say


@asynccontextmanager
async def serving(
    machine: Machine, base: RouterConfig = BASE, **rule: object
) -> AsyncIterator[Routed]:
    for name in (*machine.sizes, "pulled"):
        machine.workers[name] = FakeWorker(machine.says(name))
        await machine.workers[name].start()
    config = replace(
        base,
        pool=PoolConfig(by_model=True),
        models=ModelsConfig(names=tuple(machine.sizes), **rule),  # type: ignore[arg-type]
    )
    try:
        async with router([], config, host=machine) as it:
            yield it
    finally:
        for worker in machine.workers.values():
            await worker.stop()


def models_of(it: Routed) -> ModelServers:
    assert it.state.models is not None
    return it.state.models


async def ask(http: httpx.AsyncClient, model: str | None, **fields: object) -> httpx.Response:
    body = {"messages": [], **({"model": model} if model is not None else {}), **fields}
    return await http.post("/v1/chat/completions", json=body)


async def states(http: httpx.AsyncClient) -> dict[str, str]:
    listing = (await http.get("/v1/models")).json()
    return {entry["id"]: entry["status"]["value"] for entry in listing["data"]}


async def test_models_take_turns_and_no_request_is_lost() -> None:
    machine = Machine(a=0, b=0, c=0)
    async with serving(machine, most=1) as it:
        names = [("a", "b", "c")[i % 3] for i in range(30)]
        answers = await asyncio.gather(*(ask(it.http, name) for name in names))
        assert [answer.json()["by"] for answer in answers] == names
        assert machine.most == 1
        assert len(machine.started) <= 6, "requests of one model share its turns"


async def test_a_stream_ends_before_its_model_gives_up_its_place() -> None:
    machine = Machine(a=0, b=0)
    async with serving(machine, most=1) as it, asyncio.TaskGroup() as group:
        body = {"model": "a", "messages": [], "stream": True}
        async with it.http.stream("POST", "/v1/chat/completions", json=body) as stream:
            pieces = stream.aiter_text()
            assert "1" in await anext(pieces)
            other = group.create_task(ask(it.http, "b"))
            model = await models_of(it).find("a")
            await until(lambda: model.state is State.UNLOADING)
            again = group.create_task(ask(it.http, "a"))
            machine.go.set()
            assert "a" in "".join([piece async for piece in pieces])
        assert (await other).json() == {"by": "b"}
        assert (await again).json() == {"by": "a"}
    assert machine.started == ["a", "b", "a"] and machine.most == 1


async def test_the_least_recently_used_gives_up_its_place() -> None:
    machine = Machine(a=0, b=0, c=0)
    async with serving(machine, most=2) as it:
        for name in ("a", "b", "a", "c"):
            assert (await ask(it.http, name)).json() == {"by": name}
        assert await states(it.http) == {"a": "loaded", "b": "unloaded", "c": "loaded"}


async def test_loaded_models_fit_the_memory() -> None:
    machine = Machine(a=2 * GIB, b=2 * GIB, c=3 * GIB)
    async with serving(machine, memory_gib=5.0) as it:
        for name in ("a", "b"):
            await ask(it.http, name)
        assert await states(it.http) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        await ask(it.http, "c")
        assert await states(it.http) == {"a": "unloaded", "b": "loaded", "c": "loaded"}
        assert machine.limits == {"a": 5 * GIB, "b": 3 * GIB, "c": 3 * GIB}


async def test_what_a_model_came_to_take_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WATCH_S", 0.01)
    machine = Machine(a=GIB, b=GIB)
    async with serving(machine, memory_gib=5.0) as it:
        for name in ("a", "b"):
            await ask(it.http, name)
        monkeypatch.setattr(module, "memory_of", lambda pid: 3 * GIB)
        await until(lambda: not machine.children["a"].alive)
        assert machine.children["b"].alive, "one model stays, whatever it takes"


async def test_names_that_are_not_here() -> None:
    machine = Machine(a=0, b=0)
    async with serving(machine) as it:
        refused = await ask(it.http, "c")
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "model_not_found"
        assert "a, b" in refused.json()["error"]["message"]
        assert (await it.http.get("/v1/models/c")).status_code == 404
        for name, by in (("a:latest", "a"), (None, "a"), ("", "a"), ("b", "b"), ("b-adapter", "b")):
            assert (await ask(it.http, name)).json() == {"by": by}
        machine.sizes["pulled"] = 0
        models_of(it)._looked_s = -1e9
        assert (await ask(it.http, "pulled")).json() == {"by": "pulled"}


async def test_a_default_model_takes_every_name() -> None:
    async with serving(Machine(a=0, b=0), default="b") as it:
        for name in ("nobody", None):
            assert (await ask(it.http, name)).json() == {"by": "b"}


async def test_a_form_names_its_model() -> None:
    machine = Machine(a=0, b=0)

    async def say(request: Request, reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(b'{"data": [{"id": "b"}]}' if request.method == "GET" else b"{}"))

    async with serving(machine) as it:
        machine.workers["b"].say = say
        form = {"model": (None, "b"), "file": ("a.txt", b"\r\n\r\nname=model")}
        await it.http.post("/v1/embeddings", files=form)
        assert machine.started == ["b"]


async def test_a_large_form_names_its_model_at_either_end() -> None:
    machine = Machine(a=0, b=0)

    async def say(request: Request, reader: object, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(b'{"data": [{"id": "b"}]}' if request.method == "GET" else b"{}"))

    async with serving(machine) as it:
        machine.workers["b"].say = say
        file = ("a.wav", b'name="model"\r\n' * 200_000)
        for form in ({"model": (None, "b"), "file": file}, {"file": file, "model": (None, "b")}):
            await it.http.post("/v1/audio/transcriptions", files=form)
        assert machine.started == ["b"]


@pytest.mark.parametrize(
    "said", [1 << 31, 1 << 53, 1 << 63, (1 << 64) - 1, 1e308, -1e308, "9" * 40]
)
async def test_a_keep_alive_of_any_size_is_taken(said: object) -> None:
    machine = Machine(a=0)
    async with serving(machine) as it:
        assert (await ask(it.http, "a", keep_alive=said)).json() == {"by": "a"}


async def test_a_failed_start_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(a=0, b=0)
    machine.broken = {"a"}
    async with serving(machine) as it:
        for _ in range(2):
            refused = await ask(it.http, "a")
            assert refused.status_code == 503 and "no such file" in refused.text
        assert (await ask(it.http, "b")).json() == {"by": "b"}
        listing = (await it.http.get("/v1/models/a")).json()
        assert listing["status"]["value"] == "failed" and "no such" in listing["status"]["reason"]
        machine.broken.clear()
        monkeypatch.setattr(module, "_FAILED_S", 0.0)
        assert (await ask(it.http, "a")).json() == {"by": "a"}


async def test_a_server_that_died_is_started_again() -> None:
    machine = Machine(a=0)
    async with serving(machine) as it:
        await ask(it.http, "a")
        machine.children["a"].alive = False
        assert (await ask(it.http, "a")).json() == {"by": "a"}
        assert machine.started == ["a", "a"]


@pytest.mark.parametrize("said, idle", [(0, True), ("0s", True), (-1, False), ("5m", False)])
async def test_keep_alive_decides_how_long_a_model_stays(
    said: object, idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WATCH_S", 0.01)
    machine = Machine(a=0, b=0)
    async with serving(machine) as it:
        await ask(it.http, "b", keep_alive=0)
        await ask(it.http, "a", keep_alive=said)
        await until(lambda: not machine.children["b"].alive)
        await until(lambda: machine.children["a"].alive is not idle)
        names = [entry["name"] for entry in (await it.http.get("/api/ps")).json()["models"]]
        assert names == ([] if idle else ["a"])


async def test_idle_models_are_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WATCH_S", 0.01)
    machine = Machine(a=0)
    async with serving(machine, idle_s=0.02) as it:
        await ask(it.http, "a")
        await until(lambda: not machine.children["a"].alive)
        assert (await ask(it.http, "a")).json() == {"by": "a"}


async def test_models_are_loaded_pulled_and_deleted_by_administrators() -> None:
    machine = Machine(a=0, b=0)
    keys = replace(BASE.server, api_key="user", admin_api_key="root")
    async with serving(machine, replace(BASE, server=keys)) as it:
        user, root = ({"authorization": f"Bearer {key}"} for key in ("user", "root"))
        for path in ("/models/load", "/models/unload", "/api/pull"):
            refused = await it.http.post(path, json={"model": "a"}, headers=user)
            assert refused.status_code in (401, 403)
        await it.http.post("/models/load", json={"model": "b"}, headers=root)
        assert machine.started == ["b"]
        await it.http.post("/models/unload", json={"model": "b"}, headers=root)
        assert not machine.children["b"].alive
        done = await it.http.post("/api/pull", json={"model": "pulled"}, headers=root)
        assert [line for line in done.text.splitlines() if "success" in line]
        tags = (await it.http.get("/api/tags", headers=user)).json()["models"]
        assert [entry["name"] for entry in tags] == ["a", "b", "pulled"]
        gone = {"model": "pulled"}
        await it.http.request("DELETE", "/api/delete", json=gone, headers=root)
        assert machine.hub == [("pull", "pulled"), ("rm", "/pulled")]
        assert "pulled" not in (await it.http.get("/api/tags", headers=user)).text
        for bad in ({"model": "--rm"}, {"model": 1}, {}):
            assert (await it.http.post("/api/pull", json=bad, headers=root)).status_code == 400


async def test_workers_with_different_models_get_the_requests_for_them() -> None:
    machine = Machine(a=0, b=0)
    some = [FakeWorker(machine.says(name)) for name in machine.sizes]
    for worker in some:
        await worker.start()
    config = replace(BASE, pool=PoolConfig(by_model=True))
    async with router([WorkerSpec(worker.url) for worker in some], config) as it:
        for name, by in (("a", "a"), ("b", "b"), ("a-adapter", "a")):
            for _ in range(3):
                assert (await ask(it.http, name)).json() == {"by": by}
        assert (await ask(it.http, "c")).status_code == 404
        listing = (await it.http.get("/v1/models")).json()["data"]
        assert [entry["id"] for entry in listing] == ["a", "a-adapter", "b", "b-adapter"]
    for worker in some:
        await worker.stop()


@pytest.mark.parametrize(
    "line, models, others",
    [
        ("a b --port 1", ["--models", "a", "b"], ["--port", "1"]),
        ("--threads 2 a b", ["--models", "a", "b"], ["--threads", "2"]),
        ("--models-dir x --port 1", ["--models-dir", "x"], ["--port", "1"]),
        ("a --models-max=2 b", ["--models-max=2", "--models", "a", "b"], []),
        ("a --port 1", [], []),
        ("--model-path a", [], []),
    ],
)
async def test_the_command_line_of_several_models(
    line: str, models: list[str], others: list[str]
) -> None:
    assert several_models(line.split()) == [*others, *models]


async def test_flags_of_several_models() -> None:
    def read(line: str) -> RouterConfig:
        return read_flags(line.split(), Environment().flags, lambda words: None)

    config = read("--models a b --models-max 2 --models-memory 8 --page-size 32 --port 1")
    assert config.models == ModelsConfig(names=("a", "b"), most=2, memory_gib=8.0)
    assert config.pool.start == ("--page-size", "32") and config.pool.by_model
    for other in ("--worker-urls http://x:1", "--dp-size 2", "--disable-health-check"):
        with pytest.raises(ConfigError, match=other.split()[0]):
            read(f"--models a {other}")
