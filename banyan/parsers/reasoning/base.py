"""ReasoningParser: an answer's text to what was thought and what was said, as it arrives.

Nothing is lost: thought, said and the marks between them concatenate to the text that came in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from banyan.parsers.incremental import Arriving, Reading


class Kind(Enum):
    THOUGHT = "thought"
    SAID = "said"
    MARK = "mark"
    """Tags, headers and the white space around them."""


Piece = tuple[Kind, str]


class Split:
    """Where a format puts what it reads. White space at the end of a thought or before the answer
    is a mark."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._space = ""

    def think(self, text: str) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._put(Kind.THOUGHT, kept)

    def mark(self, text: str) -> None:
        self._put(Kind.MARK, self._space + text)
        self._space = ""

    def say(self, text: str) -> None:
        self.mark("")
        self._put(Kind.SAID, text)

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _put(self, kind: Kind, text: str) -> None:
        if not text:
            return
        if self._pieces and self._pieces[-1][0] is kind:
            text = self._pieces.pop()[1] + text
        self._pieces.append((kind, text))


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its thinking.

    Attributes:
        read: (text, where to put it, whether the answer begins inside of the thinking) reads a
            whole answer.
        start, end: the texts around the thinking, as a prompt or an answer has them.
        always: an answer begins with thinking unless its prompt says otherwise.
        markers: texts that must survive detokenisation, though a vocabulary may call them special.
        answer: what stands before the answer when there was thinking; "" = `end`.
    """

    read: Callable[[Arriving, Split, bool], Reading[None]]
    start: str
    end: str
    always: bool = False
    markers: tuple[str, ...] = ()
    answer: str = ""

    def begins_inside(self, prompt: str) -> bool:
        """Whether the answer to a prompt that ends so begins inside of the thinking."""
        tail = prompt.rstrip()
        if tail.endswith(self.start):
            return True
        return self.always and not tail.endswith(self.end)


class ReasoningParser:
    """One answer's parser.

    Args:
        is_inside: the answer begins inside of the thinking (`ReasoningFormat.begins_inside`).
    """

    def __init__(self, format: ReasoningFormat, is_inside: bool) -> None:
        self._source = Arriving()
        self._split = Split()
        self._reading = format.read(self._source, self._split, is_inside)
        self._is_done = False

    def feed(self, text: str) -> list[Piece]:
        """What the new text makes certain."""
        self._source.add(text)
        self._advance()
        return self._split.take()

    def finish(self) -> list[Piece]:
        """The rest, when nothing follows."""
        self._source.end()
        self._advance()
        self._split.mark("")
        return self._split.take()

    def _advance(self) -> None:
        if self._is_done:
            return
        try:
            next(self._reading)
        except StopIteration:
            self._is_done = True
