"""Workers with scripted answers, byte by byte, and a router in the test's own loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

import httpx
import orjson

from banyan.config.schema import ServerConfig
from banyan.router.config import HealthConfig, RetryConfig, RouterConfig, WorkerSpec
from banyan.router.health import HealthMonitor
from banyan.router.lifecycle import open_metrics
from banyan.router.models import ModelHost, ModelServers
from banyan.router.routes import create_app
from banyan.router.state import AdmissionLimiter, RouterState
from banyan.router.worker_pool import WorkerPool
from banyan.server.http.listen import bind, web_server

DEADLINE_S = 60.0


@dataclass
class Request:
    """What a worker got."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def fields(self) -> dict:
        return orjson.loads(self.body)


Say = Callable[[Request, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def whole(body: bytes, status: int = 200, media: str = "application/json", more: str = "") -> bytes:
    """An answer of one piece."""
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {media}\r\ncontent-length: {len(body)}\r\n{more}"
    return head.encode() + b"\r\n" + body


def says(answer: bytes) -> Say:
    async def say(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(answer)
        await writer.drain()

    return say


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\nx-of-worker: yes\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass
class FakeWorker:
    """A server whose `say` answers every request but those about its health."""

    say: Say = says(whole(b"{}"))
    health: bytes = whole(b"")
    info: bytes = whole(b"{}", 404)
    requests: list[Request] = field(default_factory=list[Request])
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client has closed the connection."""
    reads_bodies: bool = True
    """False: `say` is called behind the head of a request, and finds the body in its reader."""
    writers: list[asyncio.StreamWriter] = field(default_factory=list[asyncio.StreamWriter])
    """Of all connections that have come."""
    port: int = 0
    server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        return len(self.writers)

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Listen no more; what is open stays."""
        assert self.server is not None
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone = (OSError, asyncio.IncompleteReadError, asyncio.CancelledError)
        self.writers.append(writer)
        with contextlib.suppress(*gone):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, target, _ = head[0].split(" ")
                headers = dict(line.split(": ", 1) for line in head[1:] if line)
                size = int(headers.get("content-length", 0)) if self.reads_bodies else 0
                body = await reader.readexactly(size)
                request = Request(method, target, headers, body)
                if request.path in ("/health", "/server_info"):
                    writer.write(self.health if request.path == "/health" else self.info)
                    continue
                self.requests.append(request)
                await self.say(request, reader, writer)
        self.left.set()
        writer.close()


@contextlib.asynccontextmanager
async def workers(*says: Say) -> AsyncIterator[list[FakeWorker]]:
    some = [FakeWorker(say) for say in says]
    for worker in some:
        await worker.start()
    try:
        yield some
    finally:
        for worker in some:
            await worker.stop()


@dataclass
class Routed:
    state: RouterState
    http: httpx.AsyncClient
    url: str
    port: int


BASE = RouterConfig(
    server=ServerConfig(port=0),
    health=HealthConfig(interval_s=0.1, first_interval_s=0.05, timeout_s=60.0),
    retry=RetryConfig(first_pause_s=0.01, longest_pause_s=0.02),
)


@contextlib.asynccontextmanager
async def router(
    specs: list[WorkerSpec],
    config: RouterConfig = BASE,
    ready: bool = True,
    key: str = "",
    host: ModelHost | None = None,
) -> AsyncIterator[Routed]:
    """A router over sockets; `ready` waits until every worker is well."""
    config = replace(config, pool=replace(config.pool, workers=tuple(specs)))
    pool = WorkerPool(config)
    models = None if host is None else ModelServers(config, pool, host)
    metrics = open_metrics(config, pool)
    state = RouterState(config, pool, AdmissionLimiter(config.limits), metrics, models)
    app = create_app(state)
    listener = bind(config.server)
    port = listener.getsockname()[1]
    web = web_server(app, 30, 1.0)
    serving = asyncio.create_task(web.serve([listener]))
    watch = asyncio.create_task(HealthMonitor(config, pool).run())
    tasks = [watch] if models is None else [watch, asyncio.create_task(models.run())]
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url = f"http://127.0.0.1:{port}"
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            httpx.AsyncClient(
                base_url=url, headers=headers, timeout=DEADLINE_S, verify=False
            ) as http,
        ):
            await until(lambda: web.started)
            if ready:
                await until(lambda: all(w.is_well for w in pool.workers))
            yield Routed(state, http, url, port)
    finally:
        for task in tasks:
            task.cancel()
        web.should_exit = True
        web.force_exit = True
        app.end_all("the test is over")
        await asyncio.gather(serving, *tasks, return_exceptions=True)
        listener.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def turns(count: int = 20) -> None:
    """Let everything else that is ready in this loop run, several times over: what was written to
    a socket before has been read at its other end then."""
    for _ in range(count):
        await asyncio.sleep(0)


def specs(some: list[FakeWorker]) -> list[WorkerSpec]:
    return [WorkerSpec(worker.url) for worker in some]
