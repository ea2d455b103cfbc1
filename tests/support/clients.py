"""Requests to a fake engine, and the events that come back."""

import asyncio
from functools import wraps

from banyan.base.ids import RequestId
from banyan.messages.requests import Generate
from banyan.messages.sampling_params import SamplingParams


def asynchronous(test):
    @wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


def generate(id="r", max_new_tokens=8):
    return Generate(
        request=RequestId(id),
        tokens=b"\1\0\0\0",
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
    )


def counting(message):
    return list(range(1, 101))


async def events_of(stream):
    return [event async for event in stream]
