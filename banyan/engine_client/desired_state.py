"""Standing: what an engine has been told to be, for as long as it serves: the verbs that hold, so
that the engine that comes in its place can be told the same."""

from collections.abc import Mapping

from banyan.messages.control_ops import MEMORY_TAGS, WEIGHTS

ATTACH = "attach_store"
"""The verb that an engine may fail at, and serve all the same."""

Value = str | int | float | bool
ControlOp = tuple[str, Mapping[str, Value]]
"""A verb (engine/control.py) and its arguments."""


class Standing:
    """Weights, adapters and a store that were taken at run time, memory that was released, and a
    pause."""

    def __init__(self) -> None:
        self._weights: Mapping[str, Value] | None = None
        self._released: frozenset[str] = frozenset()
        self._is_paused = False
        self._adapters: dict[str, Mapping[str, Value]] = {}
        """By name, those that were loaded at run time."""
        self._forgotten: frozenset[str] = frozenset()
        """Those of the start that were unloaded."""
        self._store: ControlOp | None = None
        """What the last store was attached or detached with; None = that of the start."""
        self._gone: frozenset[str] = frozenset()
        """Those that were loaded at run time and unloaded again."""

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
            case "load_adapter":
                name = str(args.get("name"))
                self._adapters[name] = dict(args)
                self._gone -= {name}
            case "unload_adapter":
                name = str(args.get("name"))
                if self._adapters.pop(name, None) is not None:
                    self._gone |= {name}
                elif name not in self._gone:  # a fleet tells what its engines have told already
                    self._forgotten |= {name}
            case "attach_store" | "detach_store":
                self._store = verb, dict(args)
            case "pause" | "resume":
                self._is_paused = verb == "pause"
            case _:
                pass

    def lacking(self, told: "Standing") -> ControlOp | None:
        """What to tell next to an engine that was told `told`, so that it becomes like this; None
        when it is."""
        if self._store is not None and told._store != self._store:  # none comes after other weights
            is_other = told._store is None and self._store[0] == ATTACH
            return ("detach_store", {}) if is_other else self._store
        if self._weights is not None and told._weights != self._weights:
            return "update_weights", self._weights
        if gone := self._forgotten - told._forgotten:
            return "unload_adapter", {"name": min(gone)}
        for name, args in self._adapters.items():
            if name not in told._adapters:
                return "load_adapter", args
        if more := self._released - told._released:
            return "release_memory", {"tags": ",".join(sorted(more))}
        if fewer := told._released - self._released:
            return "resume_memory", {"tags": ",".join(sorted(fewer))}
        if self._is_paused is not told._is_paused:
            return "pause" if self._is_paused else "resume", {}
        return None


def _tags(args: Mapping[str, Value]) -> frozenset[str]:
    return frozenset(str(args.get("tags") or ",".join(MEMORY_TAGS)).split(","))
