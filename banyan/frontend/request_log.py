"""RequestLog: one log line when a request ends (--log-requests). Lengths and ids, never text."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import RequestError
from banyan.base.log import logger
from banyan.frontend.generation import Finish, Generator, TextChunk, TextRequest, Usage

log = logger(__name__)

_LINE = (
    "request ended id=%s route=%s prompt_tokens=%d cached_tokens=%d output_tokens=%d "
    "reason=%s seconds=%.3f"
)


class RequestLog:
    """Implements Generator on another, whose every end it logs."""

    def __init__(self, generator: Generator, clock: Clock | None = None) -> None:
        self.inner = generator
        """What answers when nothing is to be logged."""
        self._clock = clock or WallClock()

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
            log.info(
                _LINE,
                request.id,
                request.route,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.output_tokens,
                reason,
                self._clock.now() - began_s,
            )


def _reason(finish: Finish) -> str:
    """Why the request ended: the code of a failure, else stop, length or abort."""
    return finish.code if finish.status else finish.reason
