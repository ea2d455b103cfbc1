"""KVEventPublisher: publishes cache events over ZeroMQ for cache-aware routers, in SGLang's format.

A message has a topic, a number (8 bytes, big-endian, increasing by one) and a msgpack batch:
[seconds, events, replica]. A reader that missed messages asks the replay endpoint for all from a
number on. Each answer has the form of a message; the last has the number −1 and no batch.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.observability import KVEvents
from banyan.kv_cache.cache_events import Removed, Stored
from banyan.lora.scheduling import id_of

log = logger(__name__)

MEDIUM = "GPU"
"""The format's word for device memory, also on a CPU."""
_END = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 200
_LOOK_MS = 100


class KVEventPublisher:
    """Sends from its own thread.

    Args:
        config: the parsed value of --kv-events-config.
        replica: number of this replica.
        block_tokens: tokens of a block.
        bare_bytes: length of a namespace without tenant and adapter.
        adapter_of: name of the adapter that the rest of a namespace belongs to; "" = none.

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
        self._context = zmq.Context()
        self._out = self._open(zmq.PUB, config.endpoint)
        self._replay = self._open(zmq.ROUTER, config.replay_endpoint)
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
        """Answer replay requests."""
        if self._replay is None:
            return
        while self._replay.poll(0):
            reader, *_, wanted = self._replay.recv_multipart()
            if len(wanted) != len(_END):
                continue
            first = int.from_bytes(wanted, "big", signed=True)
            for number, batch in self._kept:
                if int.from_bytes(number, "big", signed=True) >= first:
                    self._replay.send_multipart([reader, b"", self._topic, number, batch])
            self._replay.send_multipart([reader, b"", self._topic, _END, b""])


def _without_nulls(fields: dict[str, object]) -> dict[str, object]:
    return {k: v for k, v in fields.items() if v is not None}
