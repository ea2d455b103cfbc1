"""Administrative verbs. Each is one function: core and arguments in, Reply out."""

from collections.abc import Callable, Mapping

import msgspec

from banyan.engine.core import EngineCore
from banyan.messages.events import Reply
from banyan.messages.requests import Abort, Control, RetractAll

Verb = Callable[[EngineCore, Control, float], Reply]


def flush_cache(core: EngineCore, control: Control, now: float) -> Reply:
    """Empty the prefix cache; refused while requests are alive, but for those that wait for the end
    of a pause."""
    stats = core.stats(now)
    if (core.is_paused or not stats.waiting) and core.flush(now):
        return Reply(control.call, True, "Cache flushed.")
    return Reply(
        control.call,
        False,
        f"Cache not flushed: {stats.running} running and {stats.waiting} waiting requests.",
    )


def abort_all(core: EngineCore, control: Control, now: float) -> Reply:
    """End every request."""
    ids = core.scheduler.roster.ids()
    for request_id in ids:
        core.receive(Abort(request_id), now)
    return Reply(control.call, True, f"{len(ids)} requests aborted.")


def pause(core: EngineCore, control: Control, now: float) -> Reply:
    """Plan no more steps. `retract`: running requests give their pages back and recompute later;
    otherwise they keep them."""
    core.is_paused = True
    if control.args.get("retract"):
        core.receive(RetractAll(), now)
    return Reply(control.call, True, "Generation paused.")


def resume(core: EngineCore, control: Control, now: float) -> Reply:
    """Plan steps again."""
    core.is_paused = False
    return Reply(control.call, True, "Generation continues.")


def stats(core: EngineCore, control: Control, now: float) -> Reply:
    """Counters and the ledger as JSON."""
    return Reply(control.call, True, body=msgspec.json.encode(core.stats(now)))


VERBS: Mapping[str, Verb] = {
    "flush_cache": flush_cache,
    "abort_all": abort_all,
    "pause": pause,
    "resume": resume,
    "stats": stats,
}


def answer(core: EngineCore, control: Control, now: float) -> Reply:
    """Carry out one verb; unknown ones are answered, not ignored."""
    verb = VERBS.get(control.verb)
    if verb is None:
        known = ", ".join(VERBS)
        return Reply(control.call, False, f"unknown verb {control.verb!r}; known: {known}")
    return verb(core, control, now)
