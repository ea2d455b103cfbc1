"""Standing: what an engine has been told to be, for as long as it serves: the verbs that hold, so
that the engine that comes in its place can be told the same."""

from collections.abc import Mapping

from banyan.messages.orders import MEMORY_TAGS, WEIGHTS

Value = str | int | float | bool
Order = tuple[str, Mapping[str, Value]]
"""A verb (engine/control.py) and its arguments."""


class Standing:
    """Weights that were taken at run time, memory that was released, and a pause."""

    def __init__(self) -> None:
        self._weights: Mapping[str, Value] | None = None
        self._released: frozenset[str] = frozenset()
        self._is_paused = False

    def take(self, verb: str, args: Mapping[str, Value]) -> None:
        """The engine has carried this out."""
        match verb:
            case "update_weights":
                self._weights = dict(args)
                self._released -= {WEIGHTS}
            case "release_memory":
                self._released |= _tags(args)
            case "resume_memory":
                self._released -= _tags(args)
            case "pause" | "resume":
                self._is_paused = verb == "pause"
            case _:
                pass

    def lacking(self, told: "Standing") -> Order | None:
        """What to tell next to an engine that was told `told`, so that it becomes like this; None
        when it is."""
        if self._weights is not None and told._weights != self._weights:
            return "update_weights", self._weights
        if more := self._released - told._released:
            return "release_memory", {"tags": ",".join(sorted(more))}
        if fewer := told._released - self._released:
            return "resume_memory", {"tags": ",".join(sorted(fewer))}
        if self._is_paused is not told._is_paused:
            return "pause" if self._is_paused else "resume", {}
        return None


def _tags(args: Mapping[str, Value]) -> frozenset[str]:
    return frozenset(str(args.get("tags") or ",".join(MEMORY_TAGS)).split(","))
