"""Workloads: who asks what, when. Tokens are synthetic; what is shared between prompts is not."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from banyan.base.errors import ConfigError

MOONCAKE_BLOCK = 512
"""Tokens that one hash id of the trace stands for."""


@dataclass(frozen=True)
class Arrival:
    """One request of a workload. `prompt` is int32 little-endian."""

    at_s: float
    prompt: bytes
    output_len: int
    priority: int = 0


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    input_length: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    hash_ids: list[int]


def poisson(
    rate_rps: float,
    count: int,
    prompt_len: int,
    output_len: int,
    *,
    shared_len: int = 0,
    families: int = 1,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Arrivals of a Poisson process; prompts of one family begin with the same `shared_len` tokens.

    Prompt and output lengths are uniform between half of and one and a half times their mean.
    """
    random = Random(seed)
    now_s = 0.0
    for number in range(count):
        now_s += random.expovariate(rate_rps)
        own_len = max(1, round((prompt_len - shared_len) * random.uniform(0.5, 1.5)))
        family = random.randrange(families)
        prompt = _block(family, shared_len) + _block(families + number, own_len)
        yield Arrival(now_s, prompt, max(1, round(output_len * random.uniform(0.5, 1.5))))


def mooncake(path: str, limit: int = 0, speed: float = 1.0) -> Iterator[Arrival]:
    """A trace of github.com/kvcache-ai/Mooncake: equal hash ids become equal tokens.

    Args:
        limit: requests to read, 0 = all.
        speed: how many times faster than recorded.
    """
    decoder = msgspec.json.Decoder(_MooncakeLine)
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines):
            if limit and number >= limit:
                return
            try:
                entry = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"{path!r} line {number + 1} is no trace entry: {error}"
                ) from None
            prompt = b"".join(_block(i, MOONCAKE_BLOCK) for i in entry.hash_ids)
            yield Arrival(
                entry.timestamp / 1000 / speed,
                prompt[: 4 * entry.input_length],
                entry.output_length,
            )


def _block(name: int, length: int) -> bytes:
    """`length` tokens that begin with the name, so that blocks of two names never share a page."""
    return array("i", [name % (1 << 31), *range(1, length)][:length]).tobytes()
