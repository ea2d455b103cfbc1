"""Frames: where the events of a stream end, so that a client never gets half of one."""

MOST_HELD = 1 << 20
"""Bytes of one event that are held back; a longer one is passed on in parts."""

_MARKS = {
    b"text/event-stream": (b"\n\n", b"\r\n\r\n", b"\r\r"),
    b"application/x-ndjson": (b"\n",),
}


def is_stream(media: bytes) -> bool:
    """Whether a content type is that of a stream of events."""
    return media.partition(b";")[0].strip().lower() in _MARKS


class Frames:
    """Passes on what is whole. No byte is changed, left out or reordered.

    Args:
        media: content type of a stream.
    """

    def __init__(self, media: bytes) -> None:
        self._marks = _MARKS[media.partition(b";")[0].strip().lower()]
        self._rest = b""

    def ready(self, piece: bytes) -> bytes:
        """What of everything so far can be sent; b"" when nothing can."""
        if not self._rest and piece.endswith(self._marks):
            return piece
        searched = max(0, len(self._rest) - 3)  # but for a mark that was cut
        data = self._rest + piece
        found = [(data.rfind(mark, searched), len(mark)) for mark in self._marks]
        end = max(at + size if at >= 0 else 0 for at, size in found)
        if len(data) - end > MOST_HELD:
            end = len(data)
        self._rest = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """What is left at the end of the stream."""
        return self._rest
