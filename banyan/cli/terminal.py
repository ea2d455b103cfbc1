"""The terminal of `banyan chat`: reads questions with editing and history, shows text inertly."""

import importlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PROMPT = "> "
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_NOTICED_WITHIN_S = 0.2
"""How long a Ctrl-C may stay unseen while a line is typed."""


class Terminal:
    """Standard input and output of a talk.

    Where Python has GNU readline, lines are edited, arrows bring back earlier ones, and a pasted
    text of several lines is one question (bracketed paste).
    """

    def __init__(self) -> None:
        self.is_person = sys.stdin.isatty()
        """False = questions come from a file or another program."""
        self._is_thinking = False
        if self.is_person:
            _edit_lines()

    def read(self) -> str:
        """The next question or command, its ends as they were typed.

        Raises:
            EOFError, KeyboardInterrupt: as the person pressed.
        """
        if not self.is_person:
            return input()
        with _signals_noticed():
            return input(_PROMPT)

    def say(self, text: str) -> None:
        """Print a line about the chat to standard error."""
        print(text, file=sys.stderr, flush=True)

    def show(self, piece: str) -> None:
        """A piece of an answer, without the control characters that could drive the terminal."""
        if self._is_thinking and piece:
            self._is_thinking = False
            self.say(_PLAIN)
        print(_inert(piece), end="", flush=True)

    def show_thought(self, piece: str) -> None:
        """What a model says to itself: dim, and to people only; never on standard output."""
        if piece and sys.stderr.isatty():
            begun = "" if self._is_thinking else _DIM
            self._is_thinking = True
            print(begun + _inert(piece), end="", file=sys.stderr, flush=True)


@contextmanager
def _signals_noticed() -> Iterator[None]:
    """Wake a wait for keys now and then, that it looks for signals.

    Python's readline waits in select(): a Ctrl-C that comes between two such waits interrupts
    none, and would be seen only after the line, which it then throws away.
    """
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, _NOTICED_WITHIN_S, _NOTICED_WITHIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _inert(text: str) -> str:
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def _edit_lines() -> None:
    try:
        readline = importlib.import_module("readline")
    except ImportError:
        return  # a Python without it: lines come as the terminal gives them
    readline.parse_and_bind("set enable-bracketed-paste on")
