"""Requests leave nothing behind: what is alive after many of a kind is what was alive before.

The engine runs in this process. Between two measurements its cache is emptied, so that only what
grows with the number of requests is left: objects that the interpreter has allocated.
"""

import asyncio
import contextlib
import gc
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from banyan.base.errors import RequestError
from banyan.llm import Engine

ROUND = 60
"""Requests between two measurements."""
PAGES = 48
LEFT = ROUND // 4
"""Objects that may be left of a round. One for each request would be four times as many."""
ROUNDS = 12
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})

Kind = Callable[[Engine, int], Awaitable[object]]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    flags = {"threads": 1, "page_size": 16, "max_total_tokens": 16 * PAGES, "check_ledger": True}
    with Engine(str(tiny_model), engine_mode="inprocess", random_seed=7, **flags) as running:
        yield running


def prompt(number: int) -> str:
    """One of some that share their beginning and do not fit the cache together."""
    return "The banyan " * (1 + number % 24) + str(number % 24)


def plain(**fields: object) -> Kind:
    params = {"max_new_tokens": 3, "temperature": 0}
    params |= fields.pop("sampling_params", {})

    async def ask(engine: Engine, number: int) -> object:
        return await engine.async_generate(prompt(number), dict(params), **fields)

    return ask


async def named(engine: Engine, number: int) -> object:
    """With an id that never comes again."""
    params = {"max_new_tokens": 3, "temperature": 0}
    return await engine.async_generate(prompt(number), params, rid=f"request-{number}")


async def cancelled(engine: Engine, number: int) -> None:
    params = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
    stream = await engine.async_generate(prompt(number), params, stream=True)
    async with contextlib.aclosing(stream) as pieces:
        async for _ in pieces:
            break


async def refused(engine: Engine, number: int) -> None:
    with pytest.raises(RequestError):
        await engine.async_generate(prompt(number), {"top_p": 2.0})
    with pytest.raises(RequestError):
        await engine.async_generate("x " * 3000, {"max_new_tokens": number})


KINDS: dict[str, Kind] = {
    "plain": plain(),
    "sampled": plain(sampling_params={"temperature": 1.0, "top_k": 9, "frequency_penalty": 0.5}),
    "stop strings": plain(sampling_params={"stop": ["a", "bc"], "max_new_tokens": 8}),
    "several": plain(sampling_params={"n": 3, "temperature": 1.0}),
    "log-probabilities": plain(return_logprob=True, logprob_start_len=0, top_logprobs_num=2),
    "schema": plain(sampling_params={"json_schema": SCHEMA, "max_new_tokens": 8}),
    "named": named,
    "cancelled": cancelled,
    "refused": refused,
}


async def many(engine: Engine, kind: Kind, first: int) -> None:
    places = asyncio.Semaphore(6)

    async def one(number: int) -> None:
        async with places:
            await kind(engine, number)

    await asyncio.gather(*(one(first + number) for number in range(ROUND)))


def alive(engine: Engine) -> int:
    """Allocated objects when nothing runs and nothing is cached."""
    engine.flush_cache()
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_left_that_grows_with_the_number_of_requests(engine: Engine, name: str) -> None:
    """Bounded stores may still fill: so of some rounds in a row, one must leave nothing."""
    left: list[int] = []
    before = alive(engine)
    for number in range(ROUNDS):
        asyncio.run(many(engine, KINDS[name], number * ROUND))
        now = alive(engine)
        left.append(now - before)
        if number > 1 and left[-1] <= LEFT:
            return
        before = now
    raise AssertionError(f"{ROUND} requests leave {left} objects")
