"""DesiredState: the state that control verbs gave an engine, so that a replacement gets the
same."""

from collections.abc import Mapping, Sequence

from banyan.messages.control_ops import MEMORY_TAGS, USUAL_TAGS, WEIGHTS

ATTACH = "attach_store"
"""A verb whose failure does not keep a replacement engine from serving."""

Value = str | int | float | bool
VerbCall = tuple[str, Mapping[str, Value]]
"""A verb (engine/control.py) and its arguments."""


class DesiredState:
    """Weights, adapters and store set at run time, released memory, and a pause."""

    def __init__(self) -> None:
        self._weights: Mapping[str, Value] | None = None
        self._released: frozenset[str] = frozenset()
        self._is_paused = False
        self._adapters: dict[str, Mapping[str, Value]] = {}
        """Adapters loaded at run time, by name."""
        self._forgotten: frozenset[str] = frozenset()
        """Adapters of the start that were unloaded."""
        self._store: VerbCall | None = None
        """Arguments of the last attach or detach of a store; None = the store of the start."""
        self._gone: frozenset[str] = frozenset()
        """Adapters loaded at run time and unloaded again."""

    def record(self, verb: str, args: Mapping[str, Value]) -> None:
        """Record a verb that the engine has executed."""
        match verb:
            case "update_weights":
                self._weights = dict(args)
                self._released -= {WEIGHTS}
            case "release_memory":
                self._released |= _tags(args, USUAL_TAGS)
            case "resume_memory":
                self._released -= _tags(args, MEMORY_TAGS)
            case "load_adapter":
                name = str(args.get("name"))
                self._adapters[name] = dict(args)
                self._gone -= {name}
            case "unload_adapter":
                name = str(args.get("name"))
                if self._adapters.pop(name, None) is not None:
                    self._gone |= {name}
                elif (
                    name not in self._gone
                ):  # a data-parallel client repeats what its engines already have
                    self._forgotten |= {name}
            case "attach_store" | "detach_store":
                self._store = verb, dict(args)
            case "pause" | "resume":
                self._is_paused = verb == "pause"
            case _:
                pass

    def lacking(self, reached: "DesiredState") -> VerbCall | None:
        """The next verb for an engine in state `reached`; None when nothing is missing."""
        if (
            self._store is not None and reached._store != self._store
        ):  # none comes after other weights
            is_other = reached._store is None and self._store[0] == ATTACH
            return ("detach_store", {}) if is_other else self._store
        if self._weights is not None and reached._weights != self._weights:
            return "update_weights", self._weights
        if gone := self._forgotten - reached._forgotten:
            return "unload_adapter", {"name": min(gone)}
        for name, args in self._adapters.items():
            if name not in reached._adapters:
                return "load_adapter", args
        if more := self._released - reached._released:
            return "release_memory", {"tags": ",".join(sorted(more))}
        if fewer := reached._released - self._released:
            return "resume_memory", {"tags": ",".join(sorted(fewer))}
        if self._is_paused is not reached._is_paused:
            return "pause" if self._is_paused else "resume", {}
        return None


def _tags(args: Mapping[str, Value], default: Sequence[str]) -> frozenset[str]:
    return frozenset(str(args.get("tags") or ",".join(default)).split(","))
