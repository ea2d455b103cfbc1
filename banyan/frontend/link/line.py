"""Line: the traffic with one engine. Messages that wait to be sent, events as they come; a failure
of either is told, never silent."""

import asyncio
from collections.abc import Awaitable, Callable

from banyan.base.log import logger
from banyan.messages.events import Event
from banyan.messages.link import FrontLink
from banyan.messages.requests import Message

log = logger(__name__)


class Line:
    """
    Args:
        link: the front's end; closed by `close`.
        deliver: called with every event, in order.
        failed: called with what happened when the link fails.
    """

    def __init__(
        self, link: FrontLink, deliver: Callable[[Event], None], failed: Callable[[str], None]
    ) -> None:
        self.link = link
        self._deliver = deliver
        self._failed = failed
        self._outbox: list[Message] = []
        self._has_mail = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Begin to send and to listen."""
        self._tasks = [
            asyncio.create_task(self._guard(self._send_all), name="engine-client-send"),
            asyncio.create_task(self._guard(self._receive_all), name="engine-client-receive"),
        ]

    def post(self, message: Message) -> None:
        self._outbox.append(message)
        self._has_mail.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self.link.close()

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            log.exception("the link to the engine failed")
            self._failed(f"The link to the engine failed: {type(error).__name__}: {error}")

    async def _send_all(self) -> None:
        while True:
            await self._has_mail.wait()
            self._has_mail.clear()
            messages, self._outbox = self._outbox, []
            await self.link.send(messages)

    async def _receive_all(self) -> None:
        while True:
            for event in await self.link.receive():
                self._deliver(event)
