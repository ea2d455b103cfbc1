"""Onlookers: whoever notes what becomes of a request on its way to its reader: figures, lines of a
log, spans. Each is told of its end exactly once."""

from collections.abc import Callable
from typing import Protocol

from banyan.base.errors import RequestError
from banyan.requests.chunks import Chunks, Through
from banyan.requests.generation import TextChunk


class RequestObserver(Protocol):
    """Of one request."""

    def take(self, chunk: TextChunk) -> None: ...

    def refuse(self, error: RequestError) -> None:
        """It fails; `end` follows."""
        ...

    def end(self) -> None:
        """Its last chunk was taken, or its reader went away before."""
        ...


def watched(onlooker: RequestObserver, begin: Callable[[], Chunks[TextChunk]]) -> Chunks[TextChunk]:
    """What `begin` gives, seen by `onlooker`, who is also told when it raises RequestError."""
    try:
        return _Watched(begin(), onlooker)
    except RequestError as error:
        onlooker.refuse(error)
        onlooker.end()
        raise


class _Watched(Through[TextChunk]):
    def __init__(self, inner: Chunks[TextChunk], onlooker: RequestObserver) -> None:
        super().__init__(inner)
        self._onlooker = onlooker
        self._has_ended = False

    def take(self) -> TextChunk | None:
        try:
            chunk = self.inner.take()
        except RequestError as error:
            self._onlooker.refuse(error)
            self._end()
            raise
        if chunk is not None:
            self._onlooker.take(chunk)
            if chunk.finish is not None:
                self._end()
        return chunk

    def close(self) -> None:
        self.inner.close()
        self._end()

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._onlooker.end()
