"""KVEventPublisher: publishes cache events over ZeroMQ for cache-aware routers, in SGLang's format.

A message has a topic, a number (8 bytes, big-endian, increasing by one) and a msgpack batch:
[seconds, events, replica]. A reader that missed messages asks the replay endpoint for all from a
number on. Each answer has the form of a message; the last has the number −1 and no batch.

Batches hold the token ids of prompts. So with BANYAN_DIST_SECRET a replay request must carry a code
made from it (`replay_code`), in a frame before the number. Without a secret, a replay endpoint with
the host `*` listens on the loopback address only.
"""

import contextlib
import hmac
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec
import zmq

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.base.os import is_loopback
from banyan.config.observability import KVEvents, replay_code
from banyan.kv_cache.cache_events import Removed, Stored
from banyan.lora.scheduling import id_of

log = logger(__name__)

MEDIUM = "GPU"
"""The format's word for device memory, also on a CPU."""
_END = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 200
_LOOPBACK = "127.0.0.1"
_LOOK_MS = 100
_MOST_REPLAYS = 16
"""Readers that are answered at the same time; requests of others are dropped."""
_MOST_REQUESTS = 64
"""Replay requests that are read at once."""
_MOST_SENT = 256
"""Batches that are replayed at once."""
_REPLAY_PAUSE_S = 0.05
"""Between two rounds of such work, so that a flood of requests costs a bounded share of time."""


class KVEventPublisher:
    """Sends from its own thread.

    Args:
        config: the parsed value of --kv-events-config.
        replica: number of this replica.
        block_tokens: tokens of a block.
        bare_bytes: length of a namespace without tenant and adapter.
        adapter_of: name of the adapter that the rest of a namespace belongs to; "" = none.
        secret: shared with the readers that may ask for a replay; "" = any.

    Raises:
        ConfigError: an endpoint cannot be opened.
    """

    def __init__(
        self,
        config: KVEvents,
        replica: int,
        block_tokens: int,
        bare_bytes: int,
        adapter_of: Callable[[bytes], str],
        secret: str = "",
    ) -> None:
        self._config, self._replica = config, replica
        self._block_tokens, self._bare_bytes = block_tokens, bare_bytes
        self._adapter_of = adapter_of
        self._topic = config.topic.encode()
        self._queue: queue.Queue[bytes | None] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        """(number, batch), oldest first."""
        self._next = 0
        self._num_lost = 0
        self._secret = secret
        self._replays: dict[bytes, int] = {}
        """Reader -> the next number that it gets."""
        self._looked = 0.0
        self._has_refused = False
        self._context = zmq.Context()
        self._out = self._open(zmq.PUB, config.endpoint)
        self._replay = self._open(zmq.ROUTER, replay_endpoint(config.replay_endpoint, secret))
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        self._put([("AllBlocksCleared", {})])

    def publish(self, events: Sequence[Stored | Removed]) -> None:
        """Queue events for sending; never blocks."""
        if events:
            self._put([self._event(event) for event in events])

    def close(self) -> None:
        """Send queued events, for about a second at most, and close."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(1.0)
        self._context.destroy(_LINGER_MS)

    def _put(self, events: list[tuple[str, dict[str, object]]]) -> None:
        shown: list[object]
        if self._config.encoding == "map":
            shown = [{"type": kind, **_without_nulls(fields)} for kind, fields in events]
        else:
            shown = [[kind, *fields.values()] for kind, fields in events]
        batch = msgspec.msgpack.encode([time.time(), shown, self._replica])
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            self._num_lost += 1
            if self._num_lost == 1:
                log.error("cache events are lost: %d wait already", self._config.max_queue_size)

    def _event(self, event: Stored | Removed) -> tuple[str, dict[str, object]]:
        if isinstance(event, Removed):
            return "BlockRemoved", {"block_hashes": event.names, "medium": MEDIUM}
        salt = event.namespace[self._bare_bytes :]
        adapter = self._adapter_of(salt)
        return "BlockStored", {
            "block_hashes": event.names,
            "parent_block_hash": event.parent,
            "token_ids": list(memoryview(bytes(event.tokens)).cast("i")),
            "block_size": self._block_tokens,
            "lora_id": id_of(adapter) if adapter else None,
            "medium": MEDIUM,
            **({"lora_name": adapter} if adapter else {}),
            **({"cache_salt": salt.hex()} if salt and self._config.encoding == "map" else {}),
        }

    def _open(self, kind: int, endpoint: str) -> "zmq.Socket[bytes] | None":
        if not endpoint:
            return None
        own = self._config.of(endpoint, self._replica)
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.LINGER, _LINGER_MS)
        opened.setsockopt(zmq.SNDHWM, self._config.hwm)
        opened.setsockopt(zmq.MAXMSGSIZE, 1 << 10)  # of replay requests
        try:
            if kind == zmq.ROUTER or self._config.is_bound:
                opened.bind(own)
            else:
                opened.connect(own)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(
                f"--kv-events-config: {own} cannot be used: {error}", hint="name another endpoint"
            ) from None
        return opened

    def _run(self) -> None:
        while True:
            try:
                batch = self._queue.get(timeout=_LOOK_MS / 1000)
            except queue.Empty:
                self._answer()
                continue
            if batch is None:
                return
            number = self._next.to_bytes(8, "big", signed=True)
            self._next += 1
            self._kept.append((number, batch))
            if self._out is not None:
                self._out.send_multipart([self._topic, number, batch])
            self._answer()

    def _answer(self) -> None:
        """Do a bounded part of the replays."""
        now = time.monotonic()
        if self._replay is None or now < self._looked + _REPLAY_PAUSE_S:
            return
        self._looked = now
        for _ in range(_MOST_REQUESTS):
            if not self._replay.poll(0):
                break
            self._take_request(*self._replay.recv_multipart())
        left = _MOST_SENT
        for reader in list(self._replays):
            left -= self._replay_part(self._replay, reader, left)

    def _take_request(self, reader: bytes, *frames: bytes) -> None:
        wanted = frames[-1] if frames else b""
        if len(wanted) != len(_END):
            return
        code = frames[-2] if len(frames) > 1 else b""
        if self._secret and not hmac.compare_digest(code, replay_code(self._secret, wanted)):
            if not self._has_refused:
                self._has_refused = True
                log.warning(
                    "a replay of cache events was refused: the reader does not have "
                    "BANYAN_DIST_SECRET; this is not logged again"
                )
            return
        if reader in self._replays or len(self._replays) < _MOST_REPLAYS:
            self._replays[reader] = int.from_bytes(wanted, "big", signed=True)

    def _replay_part(self, replay: "zmq.Socket[bytes]", reader: bytes, most: int) -> int:
        """Send up to `most` batches to a reader; returns how many."""
        first = self._next - len(self._kept)
        start = max(self._replays[reader], first)
        end = min(self._next, start + most)
        for number, batch in islice(self._kept, max(0, start - first), max(0, end - first)):
            replay.send_multipart([reader, b"", self._topic, number, batch])
        self._replays[reader] = end
        if end >= self._next and most > 0:
            del self._replays[reader]
            replay.send_multipart([reader, b"", self._topic, _END, b""])
        return max(0, end - start)


def replay_endpoint(endpoint: str, secret: str) -> str:
    """Where replays are served; without a secret not everywhere."""
    if secret or not endpoint.startswith("tcp://"):
        return endpoint
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if host in ("*", "0.0.0.0", "[::]"):
        log.info(
            "replay_endpoint %s listens on this machine only: batches hold the tokens of prompts. "
            "Set BANYAN_DIST_SECRET here and for the router, or name an address, to reach it from "
            "others",
            endpoint,
        )
        return f"tcp://{_LOOPBACK}:{port}"
    if not is_loopback(host):
        log.warning(
            "replay_endpoint %s gives the tokens of prompts to everyone who reaches it: set "
            "BANYAN_DIST_SECRET here and for the router",
            endpoint,
        )
    return endpoint


def _without_nulls(fields: dict[str, object]) -> dict[str, object]:
    return {k: v for k, v in fields.items() if v is not None}
