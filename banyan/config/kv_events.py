"""--kv-events-config: where an engine publishes which prefixes its cache holds."""

from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import cast

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.schema import ObserveConfig

_FLAG = "--kv-events-config"
_BOUND = ("*", "[::]", "0.0.0.0", "ipc://", "inproc://")

_KINDS = {"bind": bool, "buffer_steps": int, "hwm": int, "max_queue_size": int}


@dataclass(frozen=True)
class KVEvents:
    """
    Attributes:
        publisher: "zmq", or "null" for nobody.
        endpoint: where batches are published; of replica N its port is N higher.
        replay_endpoint: where those that were missed can be asked for; "" = nowhere.
        buffer_steps: batches that are kept for that.
        hwm: batches that wait for a slow reader; more are lost to it.
        max_queue_size: batches that wait to be published; more are lost to all.
        topic: first part of each message.
        bind: listen at the endpoints rather than call them; None = as they look.
        encoding: "map" = an event is a map with its type, "array" = a list that begins with it.
    """

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    bind: bool | None = None
    encoding: str = "map"

    @property
    def is_bound(self) -> bool:
        if self.bind is not None:
            return self.bind
        return any(mark in self.endpoint for mark in _BOUND)

    def of(self, endpoint: str, replica: int) -> str:
        """The endpoint of this replica."""
        head, colon, port = endpoint.rpartition(":")
        if not replica or not endpoint.startswith("tcp://"):
            return f"{endpoint}-{replica}" if replica else endpoint
        return f"{head}{colon}{int(port) + replica}"


def kv_events(observe: ObserveConfig) -> KVEvents | None:
    """What was asked for, None when nothing was.

    Raises:
        ConfigError: names the key that is wrong.
    """
    given = observe.kv_events
    known = [field.name for field in fields(KVEvents)]
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"{_FLAG} has no {printable(str(key), 40)!r}", hint=f"keys are {', '.join(known)}"
            )
        if value is None:
            continue
        kind = _KINDS.get(key, str)
        if type(value) is not kind or (kind is int and not 0 < cast(int, value) < 1 << 31):
            what = "an integer in [1, 2^31)" if kind is int else f"a {kind.__name__}"
            raise ConfigError(f"{_FLAG}: {key} must be {what}, got {printable(repr(value), 60)}")
    found = KVEvents(**{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    for key, choices in (("publisher", ("zmq", "null")), ("encoding", ("map", "array"))):
        if getattr(found, key) not in choices:
            raise ConfigError(f"{_FLAG}: {key} must be one of {', '.join(choices)}")
    for endpoint in (found.endpoint, found.replay_endpoint):
        _check_endpoint(endpoint)
    return found if found.publisher == "zmq" else None


def _check_endpoint(endpoint: str) -> None:
    kind, mark, rest = endpoint.partition("://")
    _, _, port = rest.rpartition(":")
    is_tcp = kind == "tcp" and port.isdigit() and 0 < int(port[:6]) < 1 << 16
    if endpoint and not (mark and rest and (is_tcp or kind in ("ipc", "inproc"))):
        raise ConfigError(
            f"{_FLAG}: {printable(endpoint, 80)!r} is no endpoint",
            hint="give tcp://*:5557, tcp://HOST:PORT or ipc://PATH",
        )


def replay_code(secret: str, number: bytes) -> bytes:
    """The frame before the number in a replay request."""
    key = blake2b(secret.encode(), digest_size=32, person=b"banyan replays").digest()
    return blake2b(number, digest_size=16, key=key).digest()
