"""Sequences: one HTTP request is one or more TextRequests, run side by side on one generator.

Whatever ends the HTTP request ends all its sequences. Knows no dialect.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from banyan.base.errors import RequestError
from banyan.base.ids import RequestId
from banyan.frontend.generation import (
    Generator,
    ScoreOptions,
    TextChunk,
    TextRequest,
    in_strides,
    join,
)
from banyan.frontend.native import namespace_of
from banyan.frontend.sampling import ParsedSampling
from banyan.server.limits import THREAD_BYTES
from banyan.server.state import OpenRequests

T = TypeVar("T")

_SALT = re.compile(r"[\w.:=+-]{1,128}", re.ASCII)


def narrowed_namespace(tenant: bytes, cache_salt: str | None, extra_key: str | None) -> bytes:
    """Prefix-cache namespace of a request; RequestError 400 names a salt outside its alphabet."""
    for name, value in (("cache_salt", cache_salt), ("extra_key", extra_key)):
        if value is not None and _SALT.fullmatch(value) is None:
            raise RequestError(
                f"{name} must be 1 to 128 letters, digits or _ . : = + -", param=name
            )
    return namespace_of(tenant, cache_salt, extra_key)


@dataclass(frozen=True)
class Origin:
    """What every sequence of one HTTP request has in common."""

    rid: str
    namespace: bytes = b""
    priority: int = 0


def sequences(
    origin: Origin,
    prompts: list[tuple[list[int], ParsedSampling]],
    scores: Callable[[list[int]], ScoreOptions],
    count: int = 0,
) -> list[TextRequest]:
    """n sequences for each prompt, in answer order: all of the first prompt, then the next.

    Args:
        count: sequences for each prompt instead of its own n; 0 = n.
    """
    found = [
        TextRequest(
            id=RequestId(""),
            prompt=ids,
            sampling=parsed.for_sequence(i),
            text=parsed.text,
            scores=scores(ids),
            namespace=origin.namespace,
            priority=origin.priority,
        )
        for ids, parsed in prompts
        for i in range(count or parsed.n)
    ]
    if len(found) == 1:
        return [replace(found[0], id=RequestId(origin.rid))]
    return [replace(r, id=RequestId(f"{origin.rid}_{i}")) for i, r in enumerate(found)]


@contextmanager
def registered(live: OpenRequests, requests: list[TextRequest]) -> Iterator[None]:
    """Keep the requests' ids in `live`; RequestError 400 when one is taken."""
    added: list[RequestId] = []
    try:
        for request in requests:
            live.add(request.id)
            added.append(request.id)
        yield
    finally:
        for request in added:
            live.drop(request)


async def run(
    generator: Generator, requests: list[TextRequest], interval: int = 1
) -> AsyncGenerator[tuple[int, TextChunk], None]:
    """(index, chunk) of all requests as they come; closing it closes every one.

    Args:
        interval: tokens that a chunk has at least, unless it is the last.

    Raises:
        RequestError: a sequence was refused or failed; the others are closed.
    """
    if len(requests) == 1:
        async with aclosing(_checked(generator, requests[0], interval)) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    mail: asyncio.Queue[tuple[int, TextChunk | Exception | None]] = asyncio.Queue(len(requests))

    async def pump(index: int, request: TextRequest) -> None:
        try:
            async with aclosing(_checked(generator, request, interval)) as chunks:
                async for chunk in chunks:
                    await mail.put((index, chunk))
            await mail.put((index, None))
        except Exception as error:
            await mail.put((index, error))

    pumps = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
    try:
        remaining = len(pumps)
        while remaining:
            index, item = await mail.get()
            if item is None:
                remaining -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _checked(
    generator: Generator, request: TextRequest, interval: int
) -> AsyncGenerator[TextChunk, None]:
    """Chunks of one sequence; a failure of the engine becomes a RequestError."""
    async with aclosing(in_strides(generator.generate(request), interval)) as chunks:
        async for chunk in chunks:
            if chunk.finish is not None and chunk.finish.status:
                finish = chunk.finish
                raise RequestError(finish.text, status=finish.status, code=finish.code or "aborted")
            yield chunk


async def collect(generator: Generator, requests: list[TextRequest]) -> list[TextChunk]:
    """The whole answer of each request as one chunk, in order."""
    parts: list[list[TextChunk]] = [[] for _ in requests]
    async with aclosing(run(generator, requests)) as chunks:
        async for index, chunk in chunks:
            parts[index].append(chunk)
    return [join(chunks) for chunks in parts]


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run CPU work about `size` bytes, in a thread when that is more than THREAD_BYTES."""
    return await asyncio.to_thread(work) if size > THREAD_BYTES else work()
