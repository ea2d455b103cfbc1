"""Settings of what an engine reports: KV cache events and the bounds of histograms."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import cast

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.env import Environment
from banyan.config.schema import Config, ObserveConfig
from banyan.model_config.model_config import ModelConfig

_FLAG = "--kv-events-config"
_BOUND = ("*", "[::]", "0.0.0.0", "ipc://", "inproc://")
_KINDS = {"bind": bool, "buffer_steps": int, "hwm": int, "max_queue_size": int}
_LENGTHS = tuple(float(1 << power) for power in range(4, 21))
_MAX_BOUNDS = 256


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


def check_histogram_buckets(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    bounds_of(config.observe.prompt_buckets)
    bounds_of(config.observe.output_buckets)
    return config


def bounds_of(rule: Sequence[str]) -> tuple[float, ...]:
    """Upper bounds from `default`, `custom N …`, or `tse MIDDLE BASE COUNT`: COUNT bounds on either
    side of MIDDLE, at distances that grow by the factor BASE.

    Raises:
        ConfigError: another rule, or numbers that are none.
    """
    if not rule or rule[0] == "default":
        return _LENGTHS
    try:
        numbers = [float(word) for word in rule[1:]]
    except ValueError:
        numbers = []
    if not all(0 < number < math.inf for number in numbers):
        numbers = []
    if rule[0] == "custom" and 0 < len(numbers) <= _MAX_BOUNDS:
        return tuple(sorted(set(numbers)))
    if rule[0] == "tse" and len(numbers) == 3 and numbers[1] > 1 and 1 <= numbers[2] <= 64:
        middle, base, count = numbers
        steps = [base**power for power in range(1, math.ceil(count / 2) + 1)]
        found = {middle, *(middle + step for step in steps), *(middle - step for step in steps)}
        return tuple(sorted(bound for bound in found if 0 < bound < math.inf))
    raise ConfigError(
        f"{' '.join(rule)!r} is no rule for bounds of lengths",
        hint="write default, custom N … (positive numbers), or tse MIDDLE BASE COUNT with BASE "
        "above 1 and COUNT up to 64",
    )
