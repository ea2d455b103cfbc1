"""Line: the traffic with one engine. Messages that wait to be sent, events as they come; a failure
of either is told, never silent."""

import asyncio
from collections.abc import Callable

from banyan.base.log import logger
from banyan.messages.events import Event
from banyan.messages.requests import Message
from banyan.messages.transport import FrontLink

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
        self._is_open = False

    def open(self) -> None:
        """Begin to send and to listen."""
        self._is_open = True
        self.link.listen(self._take)
        self._send()

    def post(self, message: Message) -> None:
        """What is posted in one turn of the event loop goes in one frame."""
        if self._is_open and not self._outbox:
            asyncio.get_running_loop().call_soon(self._send)
        self._outbox.append(message)

    def close(self) -> None:
        self._is_open = False
        self.link.close()

    def _send(self) -> None:
        if not self._is_open:
            return
        messages, self._outbox = self._outbox, []
        try:
            self.link.send(messages)
        except Exception as error:
            self._fail(error)

    def _take(self) -> None:
        """Every token comes by here, in the call in which the event loop finds that it has come."""
        try:
            for event in self.link.receive():
                self._deliver(event)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._is_open = False
        self.link.listen(None)
        log.exception("the link to the engine failed")
        self._failed(f"The link to the engine failed: {type(error).__name__}: {error}")
