"""Long constraints travel once, however many sequences use them.

Both ends of a link number the texts in order and remember the latest. A remembered text travels as
its number. A lost frame ends the link, so both ends always agree.
"""

from collections import OrderedDict

import msgspec

from banyan.messages.requests import Generate, Message

MIN_CHARS = 1024
"""Shorter texts travel as they are."""

MAX_KEPT = 16
"""Texts that each end remembers; admission bounds the length of one."""

_MARK = "="
"""Marks a number; no constraint begins with it."""


class Sender:
    """The end that replaces texts by numbers."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()
        """The latest texts, oldest first."""
        self._next = 0

    def packed(self, message: Message) -> Message:
        if not isinstance(message, Generate) or len(message.grammar) < MIN_CHARS:
            return message
        number = self._numbers.get(message.grammar)
        if number is not None:
            return msgspec.structs.replace(message, grammar=f"{_MARK}{number}")
        self._numbers[message.grammar] = self._next
        self._next += 1
        if len(self._numbers) > MAX_KEPT:
            self._numbers.popitem(last=False)
        return message


class Receiver:
    """The end that restores texts; equal texts become one object."""

    def __init__(self) -> None:
        self._texts: OrderedDict[int, str] = OrderedDict()
        self._next = 0

    def unpacked(self, message: Message) -> Message | None:
        """The original message; None if its text is unknown here."""
        if not isinstance(message, Generate):
            return message
        if message.grammar.startswith(_MARK):
            number = message.grammar.removeprefix(_MARK)
            text = self._texts.get(int(number)) if number.isdecimal() else None
            return None if text is None else msgspec.structs.replace(message, grammar=text)
        if len(message.grammar) >= MIN_CHARS:
            self._texts[self._next] = message.grammar
            self._next += 1
            if len(self._texts) > MAX_KEPT:
                self._texts.popitem(last=False)
        return message
