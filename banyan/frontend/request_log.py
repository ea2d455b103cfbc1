"""RequestLog: one log line when a request ends (--log-requests). Lengths and ids, never text."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import RequestError
from banyan.base.log import logger
from banyan.frontend.generation import Finish, Generator, TextChunk, TextRequest, Usage

log = logger(__name__)


class RequestLog:
    """Implements Generator on another, whose every end it logs.

    Args:
        as_json: the line is a JSON object.
    """

    def __init__(
        self, generator: Generator, clock: Clock | None = None, as_json: bool = False
    ) -> None:
        self.inner = generator
        """What answers when nothing is to be logged."""
        self._clock = clock or WallClock()
        self._as_json = as_json

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        began_s = self._clock.now()
        usage, reason = Usage(len(request.prompt), 0), "closed"
        try:
            async with aclosing(self.inner.generate(request)) as chunks:
                async for chunk in chunks:
                    usage = chunk.usage
                    if chunk.finish is not None:
                        reason = _reason(chunk.finish)
                    yield chunk
        except RequestError as error:
            reason = error.code
            raise
        finally:
            self._log(request, usage, reason, self._clock.now() - began_s)

    def _log(self, request: TextRequest, usage: Usage, reason: str, seconds: float) -> None:
        facts: dict[str, object] = {
            "id": request.id,
            "route": request.route,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            "reason": reason,
        }
        if self._as_json:
            log.info("%s", json.dumps({"event": "request ended", **facts, "seconds": seconds}))
            return
        words = " ".join(f"{name}={value}" for name, value in facts.items())
        log.info("request ended %s seconds=%.3f", words, seconds)


def _reason(finish: Finish) -> str:
    """Why the request ended: the code of a failure, else stop, length or abort."""
    return finish.code if finish.status else finish.reason
