"""Hearing: follows what workers tell of their caches (a server's --kv-events-config), so that a
request goes where its prefix lies, and not where it was sent once.

Of each worker it first asks where events are, hears them from then on, and asks for those from
before. A worker that tells nothing is guessed about, as are prefixes that callers have of their
own: their names say nothing to a router. Each of these is told to the log once a worker.
"""

import asyncio
import contextlib
from urllib.parse import urlsplit

import msgspec
import orjson
import zmq
import zmq.asyncio

from banyan.base.errors import BanyanError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import logger, printable
from banyan.router.config import RouterConfig
from banyan.router.upstream import Lost, NotReached
from banyan.router.worker import Worker
from banyan.scheduler.prefix_hashes import Contents

log = logger(__name__)

_FACTS_BYTES = 4 << 20
_MOST_BATCH_BYTES = 64 << 20
_MOST_REPLICAS = 64
_REPLAY_S = 5.0
_PAUSE_S = 1.0


class Unclear(BanyanError):
    """What a worker tells is nothing that is told of caches."""


class Told(msgspec.Struct, frozen=True):
    """Where a worker's events are."""

    endpoint: str
    block_size: int
    replay_endpoint: str | None = None
    topic: str = ""
    dp_size: int = 1


class Hearing:
    """Of all workers of a router, one task each. Belongs to one event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self._key = config.server.api_key.partition(" ")[0]
        self._timeout_s = config.health.timeout_s
        self._context = zmq.asyncio.Context()
        self._tasks: dict[Worker, asyncio.Task[None]] = {}

    def tend(self, worker: Worker) -> None:
        """Hear a worker that is well; forget what one held that is not."""
        task = self._tasks.get(worker)
        if worker.is_well and task is None:
            self._tasks[worker] = asyncio.create_task(self._follow(worker))
        elif not worker.is_well:
            self.drop(worker)

    def drop(self, worker: Worker) -> None:
        worker.contents = None
        task = self._tasks.pop(worker, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for worker in list(self._tasks):
            self.drop(worker)
        self._context.destroy(linger=0)

    async def _follow(self, worker: Worker) -> None:
        """Until it is cancelled, or there is nothing to hear."""
        try:
            told = await self._asked(worker)
            if told is None:
                log.warning("worker url=%s publishes no cache events: guessing", worker.url)
                return
            worker.contents = [Contents(told.block_size) for _ in range(told.dp_size)]
            log.info("hearing what the cache of url=%s holds", worker.url)
            async with asyncio.TaskGroup() as all_replicas:
                for replica, contents in enumerate(worker.contents):
                    one = _Replica(self._context, worker, told, replica, contents)
                    all_replicas.create_task(one.run())
        except (BanyanError, ExceptionGroup, OSError, TimeoutError, ValueError) as error:
            worker.contents = None
            why = printable(str(error) or type(error).__name__, 300)
            log.warning("cache events of url=%s are not heard: %s; guessing", worker.url, why)

    async def _asked(self, worker: Worker) -> Told | None:
        key = worker.spec.api_key or self._key
        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await worker.upstream.send("GET", b"/get_server_info", headers)
                body = await answer.whole(_FACTS_BYTES)
        except (NotReached, Lost) as error:
            raise Unclear(str(error)) from None
        if answer.status != 200:
            raise Unclear(f"/get_server_info answered {answer.status}")
        facts: object = orjson.loads(body)
        told = facts.get("kv_events") if is_object(facts) else None
        if told is None:
            return None
        found = msgspec.convert(told, Told)
        if not (0 < found.block_size <= 1 << 20 and 0 < found.dp_size <= _MOST_REPLICAS):
            raise Unclear(f"blocks of {found.block_size} tokens, {found.dp_size} replicas")
        return found


class _Replica:
    """What one replica of a worker tells."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        worker: Worker,
        told: Told,
        replica: int,
        contents: Contents,
    ) -> None:
        self._context, self._worker, self._contents = context, worker, contents
        self._topic = told.topic.encode()
        self._endpoint = _reachable(told.endpoint, worker.url, replica)
        self._replay = told.replay_endpoint and _reachable(
            told.replay_endpoint, worker.url, replica
        )
        self._next = 0
        """The number of the batch that comes next."""
        self._is_told = False

    async def run(self) -> None:
        hearing = self._socket(zmq.SUB, self._endpoint)
        hearing.setsockopt(zmq.SUBSCRIBE, self._topic)
        try:
            await self._catch_up()
            while True:
                _, number, batch = await hearing.recv_multipart()
                await self._heard(int.from_bytes(number, "big", signed=True), batch)
        finally:
            hearing.close(0)

    async def _heard(self, number: int, batch: bytes) -> None:
        if number == 0:  # another engine, of which nothing was heard
            self._contents.clear()
            self._next = 0
        if number < self._next:
            return  # it came when the past was asked for
        if number > self._next:
            await self._catch_up()
        if number > self._next:
            # What was let go meanwhile is not known.
            self._contents.clear()
            self._tell("some were lost, and nobody can be asked for them")
        if number >= self._next:
            self._take(number, batch)

    async def _catch_up(self) -> None:
        """Ask for what was told before."""
        if not self._replay:
            return
        asking = self._socket(zmq.DEALER, self._replay)
        try:
            async with asyncio.timeout(_REPLAY_S):
                await asking.send_multipart([b"", self._next.to_bytes(8, "big")])
                while True:
                    *_, number, batch = await asking.recv_multipart()
                    at = int.from_bytes(number, "big", signed=True)
                    if at < 0:
                        return
                    if at > self._next:
                        self._contents.clear()  # older ones are kept no more
                    if at >= self._next:
                        self._take(at, batch)
        except TimeoutError:
            self._tell(f"no answer from {self._replay} in {_REPLAY_S:g} s")
        finally:
            asking.close(0)

    def _take(self, number: int, batch: bytes) -> None:
        self._next = number + 1
        take_batch(batch, self._contents)
        if self._contents.is_of_several:
            self._tell("callers have prefixes of their own, which its names do not tell apart")

    def _socket(self, kind: int, endpoint: str) -> "zmq.asyncio.Socket":
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.MAXMSGSIZE, _MOST_BATCH_BYTES)
        try:
            made.connect(endpoint)
        except zmq.ZMQError as error:
            made.close(0)
            raise Unclear(f"{endpoint}: {error}") from None
        return made

    def _tell(self, why: str) -> None:
        if not self._is_told:
            self._is_told = True
            log.warning("cache events of url=%s: %s; guessing there", self._worker.url, why)


def take_batch(batch: bytes, contents: Contents) -> None:
    """What a batch says, in either form of its events.

    Raises:
        Unclear: it is none.
    """
    try:
        whole: object = msgspec.msgpack.decode(batch)
        events = whole[1] if is_list(whole) and len(whole) > 1 else None
        if not is_list(events):
            raise ValueError("no list of events")
        for event in events:
            _take_event(event, contents)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Unclear(f"a batch of events cannot be read: {error}") from None


def _take_event(event: object, contents: Contents) -> None:
    if is_list(event):  # the older form
        names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")
        event = dict(zip(names, event, strict=False))
    if not is_object(event):
        raise ValueError("an event of no kind")
    kind, hashes, tokens = (event.get(k) for k in ("type", "block_hashes", "token_ids"))
    if kind == "AllBlocksCleared":
        contents.clear()
    elif kind == "BlockRemoved" and is_list(hashes):
        contents.removed([h for h in hashes if isinstance(h, int)])
    elif kind == "BlockStored" and is_list(hashes) and is_list(tokens):
        if event.get("cache_salt") or event.get("lora_id") is not None:
            contents.is_of_several = True
            return
        parent = event.get("parent_block_hash")
        ids = [token for token in tokens if isinstance(token, int)]
        given = [name for name in hashes if isinstance(name, int)]
        contents.stored(given, parent if isinstance(parent, int) else None, ids)


def _reachable(endpoint: str, url: str, replica: int) -> str:
    """Where events of a replica are for who reaches the worker at `url`."""
    with contextlib.suppress(ValueError):
        head, _, port = endpoint.rpartition(":")
        if endpoint.startswith("tcp://"):
            host = urlsplit(url).hostname or "127.0.0.1"
            for anywhere in ("*", "0.0.0.0", "[::]"):
                if head == f"tcp://{anywhere}":
                    head = f"tcp://{f'[{host}]' if ':' in host else host}"
            return f"{head}:{int(port) + replica}"
    return f"{endpoint}-{replica}" if replica else endpoint
