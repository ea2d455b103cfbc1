"""Proxy: those who answer one request together, and the request as they get it."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from banyan.router.upstream import Answer, Lost, NotReached
from banyan.router.worker import Try, Worker


@dataclass
class Outgoing:
    """A request as workers get it.

    Attributes:
        target: path and query.
        headers: names in lower case.
        body: until it is needed no more.
    """

    method: str
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    def headers_for(self, worker: Worker) -> Sequence[tuple[bytes, bytes]]:
        """With the worker's own key in the place of the client's, where it has one."""
        if not worker.spec.api_key:
            return self.headers
        others = [h for h in self.headers if h[0] not in (b"authorization", b"x-api-key")]
        return [*others, (b"authorization", b"Bearer " + worker.spec.api_key.strip().encode())]


class Proxy(Protocol):
    """Those who answer one request together."""

    @property
    def workers(self) -> Sequence[Worker]: ...

    def asking(
        self, request: Outgoing, tries: Sequence[Try]
    ) -> AbstractAsyncContextManager[tuple[Answer, Try]]:
        """Their answer, as far as its head, and whose it is; what is left of it at the end of the
        block is dropped.

        Raises:
            NotReached, Lost: and the try of the worker at fault is a bad one.
        """
        ...


class Alone:
    """One worker that answers by itself."""

    def __init__(self, worker: Worker) -> None:
        self.workers = (worker,)

    @asynccontextmanager
    async def asking(
        self, request: Outgoing, tries: Sequence[Try]
    ) -> AsyncGenerator[tuple[Answer, Try]]:
        (worker,), (attempt,) = self.workers, tries
        try:
            answer = await worker.upstream.send(
                request.method, request.target, request.headers_for(worker), request.body
            )
        except (NotReached, Lost):
            attempt.is_good = False
            raise
        try:
            yield answer, attempt
        finally:
            answer.close()
