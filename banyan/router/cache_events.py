"""Subscribe to the cache events of workers (a server's --kv-events-config).

The router then sends a request to the worker that has its prefix cached. For each worker it looks
up the event endpoint, subscribes, and requests a replay of earlier events. Without events, and for
prefixes that a cache salt or an adapter separates, the router estimates from the prompts it sent.
Both cases are logged once per worker.
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
from banyan.config.observability import replay_code
from banyan.router.config import RouterConfig
from banyan.router.upstream import WorkerLost, WorkerUnreachable
from banyan.router.worker import Worker
from banyan.scheduler.routing import Contents

log = logger(__name__)

_FACTS_BYTES = 4 << 20
_MOST_BATCH_BYTES = 64 << 20
_MOST_REPLICAS = 64
_REPLAY_S = 5.0
_PAUSE_S = 1.0


class BadCacheEvents(BanyanError):
    """A worker sent something that is not a valid cache event."""


class EventEndpoint(msgspec.Struct, frozen=True):
    """The address and shape of a worker's cache events, from /get_server_info."""

    endpoint: str
    block_size: int
    replay_endpoint: str | None = None
    topic: str = ""
    dp_size: int = 1


class CacheEventSubscriber:
    """Subscriptions to the workers of a router, one task each. Belongs to one event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self._key = config.server.api_key.partition(" ")[0]
        self._timeout_s = config.health.timeout_s
        self._secret = config.policy.events_secret
        self._context = zmq.asyncio.Context()
        self._tasks: dict[Worker, asyncio.Task[None]] = {}

    def update(self, worker: Worker) -> None:
        """Subscribe to a worker that is healthy; drop the state of one that is not."""
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
        """Follow the events of a worker until cancelled; return if it has none."""
        try:
            endpoint = await self._endpoint_of(worker)
            if endpoint is None:
                log.warning("worker url=%s publishes no cache events: guessing", worker.url)
                return
            worker.contents = [Contents(endpoint.block_size) for _ in range(endpoint.dp_size)]
            log.info("following the cache events of url=%s", worker.url)
            async with asyncio.TaskGroup() as all_replicas:
                for replica, contents in enumerate(worker.contents):
                    one = _ReplicaSubscription(
                        self._context, worker, endpoint, replica, contents, self._secret
                    )
                    all_replicas.create_task(one.run())
        except (BanyanError, ExceptionGroup, OSError, TimeoutError, ValueError) as error:
            worker.contents = None
            why = printable(str(error) or type(error).__name__, 300)
            log.warning("cache events of url=%s cannot be followed: %s; guessing", worker.url, why)

    async def _endpoint_of(self, worker: Worker) -> EventEndpoint | None:
        key = worker.spec.api_key or self._key
        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await worker.upstream.send("GET", b"/get_server_info", headers)
                body = await answer.whole(_FACTS_BYTES)
        except (WorkerUnreachable, WorkerLost) as error:
            raise BadCacheEvents(str(error)) from None
        if answer.status != 200:
            raise BadCacheEvents(f"/get_server_info answered {answer.status}")
        facts: object = orjson.loads(body)
        found = facts.get("kv_events") if is_object(facts) else None
        if found is None:
            return None
        endpoint = msgspec.convert(found, EventEndpoint)
        blocks, replicas = endpoint.block_size, endpoint.dp_size
        if not (0 < blocks <= 1 << 20 and 0 < replicas <= _MOST_REPLICAS):
            raise BadCacheEvents(f"blocks of {blocks} tokens, {replicas} replicas")
        return endpoint


class _ReplicaSubscription:
    """The event subscription of one replica of a worker."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        worker: Worker,
        endpoint: EventEndpoint,
        replica: int,
        contents: Contents,
        secret: str = "",
    ) -> None:
        self._secret = secret
        self._context, self._worker, self._contents = context, worker, contents
        self._topic = endpoint.topic.encode()
        self._endpoint = _reachable(endpoint.endpoint, worker.url, replica)
        self._replay = endpoint.replay_endpoint and _reachable(
            endpoint.replay_endpoint, worker.url, replica
        )
        self._next = 0
        """Sequence number of the next batch."""
        self._has_warned = False

    async def run(self) -> None:
        events = self._socket(zmq.SUB, self._endpoint)
        events.setsockopt(zmq.SUBSCRIBE, self._topic)
        try:
            await self._catch_up()
            while True:
                _, number, batch = await events.recv_multipart()
                await self._on_batch(int.from_bytes(number, "big", signed=True), batch)
        finally:
            events.close(0)

    async def _on_batch(self, number: int, batch: bytes) -> None:
        if number == 0:  # a new engine
            self._contents.clear()
            self._next = 0
        if number < self._next:
            return  # already received by the replay
        if number > self._next:
            await self._catch_up()
        if number > self._next:
            # Blocks may have been removed in the missing batches.
            self._contents.clear()
            self._warn_once("some were lost and cannot be replayed")
        if number >= self._next:
            self._take(number, batch)

    async def _catch_up(self) -> None:
        """Request a replay of earlier batches."""
        if not self._replay:
            return
        asking = self._socket(zmq.DEALER, self._replay)
        try:
            async with asyncio.timeout(_REPLAY_S):
                number = self._next.to_bytes(8, "big")
                code = [replay_code(self._secret, number)] if self._secret else []
                await asking.send_multipart([b"", *code, number])
                while True:
                    *_, number, batch = await asking.recv_multipart()
                    at = int.from_bytes(number, "big", signed=True)
                    if at < 0:
                        return
                    if at > self._next:
                        self._contents.clear()  # older batches are no longer available
                    if at >= self._next:
                        self._take(at, batch)
        except TimeoutError:
            self._warn_once(f"no answer from {self._replay} in {_REPLAY_S:g} s")
        finally:
            asking.close(0)

    def _take(self, number: int, batch: bytes) -> None:
        self._next = number + 1
        take_batch(batch, self._contents)
        if self._contents.is_of_several:
            self._warn_once("prefixes are separated per caller, which block hashes do not show")

    def _socket(self, kind: int, endpoint: str) -> "zmq.asyncio.Socket":
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.MAXMSGSIZE, _MOST_BATCH_BYTES)
        try:
            made.connect(endpoint)
        except zmq.ZMQError as error:
            made.close(0)
            raise BadCacheEvents(f"{endpoint}: {error}") from None
        return made

    def _warn_once(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("cache events of url=%s: %s; guessing there", self._worker.url, why)


def take_batch(batch: bytes, contents: Contents) -> None:
    """Apply a batch of events, in either of their forms, to `contents`.

    Raises:
        BadCacheEvents: the batch is invalid.
    """
    try:
        whole: object = msgspec.msgpack.decode(batch)
        events = whole[1] if is_list(whole) and len(whole) > 1 else None
        if not is_list(events):
            raise ValueError("no list of events")
        for event in events:
            _take_event(event, contents)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadCacheEvents(f"a batch of events cannot be read: {error}") from None


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
    """The event address of a replica, with a wildcard host replaced by the host of `url`."""
    with contextlib.suppress(ValueError):
        head, _, port = endpoint.rpartition(":")
        if endpoint.startswith("tcp://"):
            host = urlsplit(url).hostname or "127.0.0.1"
            for anywhere in ("*", "0.0.0.0", "[::]"):
                if head == f"tcp://{anywhere}":
                    head = f"tcp://{f'[{host}]' if ':' in host else host}"
            return f"{head}:{int(port) + replica}"
    return f"{endpoint}-{replica}" if replica else endpoint
