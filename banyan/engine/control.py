"""Administrative verbs. Each is one function: core and arguments in, Reply out; None where the
reply comes once every rank has carried out the orders that the verb gives."""

import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain, islice

import msgspec

from banyan.base.ids import RequestId
from banyan.engine.core import EngineCore
from banyan.messages.control_ops import (
    MEMORY_TAGS,
    AttachStore,
    ControlOp,
    DetachStore,
    ForgetDrafts,
    ReadWeight,
    RecordExperts,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
    TakeWeights,
)
from banyan.messages.events import BUSY, PinFact, Reply
from banyan.messages.requests import (
    Abort,
    Control,
    LoadAdapter,
    RetractAll,
    RunControlOps,
    UnloadAdapter,
    Unpin,
)

Verb = Callable[[EngineCore, Control, float], Reply | None]


def flush_cache(core: EngineCore, control: Control, now: float) -> Reply | None:
    """Empty the prefix cache, and what drafts are made from; refused while requests are alive, but
    for those that wait for the end of a pause. `pinned`: of what is pinned too."""
    stats = core.stats(now)
    if control.args.get("pinned") and (core.is_paused or not stats.running + stats.waiting):
        core.receive(Unpin(), now)
    if (core.is_paused or not stats.waiting) and core.flush(now):
        if core.scheduler.speculation is not None:
            return _give(core, control, now, ForgetDrafts())
        return Reply(control.call, True, "Cache flushed.")
    return Reply(
        control.call,
        False,
        f"Cache not flushed: {stats.running} running and {stats.waiting} waiting requests.",
    )


def pins(core: EngineCore, control: Control, now: float) -> Reply:
    """What is pinned, as JSON."""
    facts = [
        PinFact(*(RequestId(pin.name), pin.tokens, pin.num_pages, pin.until_s - now, pin.priority))
        for pin in core.scheduler.cache.pins.alive(now)
    ]
    return Reply(control.call, True, body=msgspec.json.encode(facts))


def unpin(core: EngineCore, control: Control, now: float) -> Reply:
    """Let the pages of one pin go, or those of all; told how many there were."""
    wanted = RequestId(str(control.args.get("pin", "")))
    known = [pin.name for pin in core.scheduler.cache.pins.alive(now)]
    core.receive(Unpin(wanted), now)
    found = [name for name in known if wanted in ("", name)]
    return Reply(control.call, True, body=msgspec.json.encode(len(found)))


def abort_all(core: EngineCore, control: Control, now: float) -> Reply:
    """End every request."""
    ids = [request.id for request in core.scheduler.request_table.alive]
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


def requests(core: EngineCore, control: Control, now: float) -> Reply:
    """Those that live, in the order in which they are served, as JSON; `limit` bounds how many."""
    request_table = core.scheduler.request_table
    found = islice(
        chain(request_table.running, request_table.waiting), int(control.args.get("limit", 0))
    )
    body = msgspec.json.encode([request.as_live(now) for request in found])
    return Reply(control.call, True, body=body)


def update_weights(
    core: EngineCore, control: Control, now: float, is_trial: bool = False
) -> Reply | None:
    """Take the weights of another checkpoint on every rank, or on none."""
    flushes = bool(control.args.get("flush_cache", True))
    running = core.stats(now).running
    if refusal := _while_joined(core, control) or _while_requests_live(core, control, now):
        return refusal
    if flushes and running:
        return Reply(
            control.call,
            False,
            f"{running} requests hold pages of the old weights. Pause by retract, or send "
            "flush_cache false to let them keep those.",
        )
    path = str(control.args.get("path"))
    return _give(core, control, now, TakeWeights(path, secrets.token_hex(8), flushes, is_trial))


def release_memory(
    core: EngineCore, control: Control, now: float, is_trial: bool = False
) -> Reply | None:
    """Give memory back to the system, and plan no rows until all of it is there again."""
    refusal = _while_joined(core, control) or _while_requests_live(core, control, now)
    return refusal or _give(core, control, now, ReleaseMemory(_tags(control), is_trial))


def resume_memory(core: EngineCore, control: Control, now: float) -> Reply | None:
    """Take released memory back."""
    refusal = _while_joined(core, control)
    return refusal or _give(core, control, now, ResumeMemory(_tags(control)))


def read_weight(core: EngineCore, control: Control, now: float) -> Reply | None:
    """The first rows of one tensor of the checkpoint that is served."""
    name, rows = str(control.args.get("name")), int(control.args.get("rows") or 1)
    return _give(core, control, now, ReadWeight(name, rows))


def attach_store(
    core: EngineCore, control: Control, now: float, is_trial: bool = False
) -> Reply | None:
    """Keep pages in a store from here on, on every rank or on none."""
    tier, args = core.scheduler.cache.tier, control.args
    if tier is None:
        text = "This server was not started for a store. Start it with --enable-hierarchical-cache."
        return Reply(control.call, False, text)
    if tier.is_attached:
        return Reply(control.call, False, "A store is attached already. Detach it first.")
    if core.scheduler.cache.weights != tier.weights:
        text = "Other weights were taken since the start, whose pages no store keeps. Start again."
        return Reply(control.call, False, text)
    order = AttachStore(
        store=str(args.get("store")),
        options=str(args.get("options") or "{}").encode(),
        write=str(args.get("write")),
        prefetch=str(args.get("prefetch")),
        threshold=int(args.get("threshold") or 0),
        timeout_s=float(args.get("patience_s") or 0.0),
        timeout_per_ki_s=float(args.get("patience_per_ki_s") or 0.0),
        is_trial=is_trial,
    )
    return _while_requests_run(core, control, now) or _give(core, control, now, order)


def detach_store(
    core: EngineCore, control: Control, now: float, is_trial: bool = False
) -> Reply | None:
    """Let go of the store. `force`: what is on its way there is left out."""
    tier = core.scheduler.cache.tier
    if tier is None or not tier.is_attached:
        return Reply(control.call, True, "There was no store.")
    if refusal := _while_requests_run(core, control, now):
        return refusal
    loading, pending = tier.num_loading, 0 if control.args.get("force") else tier.pending
    if loading or pending:
        text = (
            f"{loading} pages are on their way from the store and {pending} on their way to it"
            f"{'' if loading else '; force=true leaves these out'}."
        )
        return Reply(control.call, False, text, body=BUSY)
    return _give(core, control, now, DetachStore(is_trial))


def start_profile(core: EngineCore, control: Control, now: float) -> Reply | None:
    """Record the steps on every rank."""
    order = StartProfile(
        folder=str(control.args.get("output_dir") or ""),
        prefix=str(control.args.get("profile_prefix") or ""),
        stamp=time.time_ns() // 1000,
        steps=int(control.args.get("num_steps") or 0),
    )
    return _give(core, control, now, order)


def stop_profile(core: EngineCore, control: Control, now: float) -> Reply | None:
    """Write what was recorded; one file for each rank."""
    return _give(core, control, now, StopProfile())


def record_experts(core: EngineCore, control: Control, now: float, what: str) -> Reply | None:
    """Start or stop to record the choices of experts, or write them down."""
    return _give(core, control, now, RecordExperts(what, time.time_ns() // 1000))


def load_adapter(core: EngineCore, control: Control, now: float) -> Reply | None:
    """Load an adapter under a name; answered when every rank has it, or none."""
    if refusal := _while_joined(core, control):
        return refusal
    name, path = str(control.args.get("name")), str(control.args.get("path"))
    core.receive(LoadAdapter(control.call, name, path, bool(control.args.get("pinned"))), now)
    return None


def unload_adapter(core: EngineCore, control: Control, now: float) -> Reply | None:
    """Forget an adapter; answered when the last of its requests has ended and it has gone."""
    if refusal := _while_joined(core, control):
        return refusal
    core.receive(UnloadAdapter(control.call, str(control.args.get("name"))), now)
    return None


def _give(core: EngineCore, control: Control, now: float, order: ControlOp) -> None:
    core.receive(RunControlOps(control.call, [order]), now)


def _while_joined(core: EngineCore, control: Control) -> Reply | None:
    """A refusal where other replicas compute with the same weights, step by step."""
    if not core.uses_dp_attention:
        return None
    told = "Weights, adapters and memory stay as they are while replicas share feed-forward blocks."
    return Reply(control.call, False, f"{told} Start again.")


def _while_requests_live(core: EngineCore, control: Control, now: float) -> Reply | None:
    """A refusal while requests live, unless they wait for the end of a pause, or of the want of
    memory. A trial is told `is_idle` when the pause is its own."""
    stats = core.stats(now)
    is_held = core.is_paused and not control.args.get("is_idle") or bool(core.released)
    if is_held or not stats.running + stats.waiting:
        return None
    return Reply(
        control.call,
        False,
        f"{stats.running} running and {stats.waiting} waiting requests. Pause generation, or send "
        "abort_all_requests.",
    )


def _while_requests_run(core: EngineCore, control: Control, now: float) -> Reply | None:
    """A refusal while there are requests, unless they wait for the end of a pause."""
    stats = core.stats(now)
    is_held = core.is_paused and not control.args.get("is_idle")
    if not stats.running and (is_held or not stats.waiting):
        return None
    text = (
        f"{stats.running} running and {stats.waiting} waiting requests. A store is attached and "
        "detached while there are none."
    )
    return Reply(control.call, False, text)


def _tags(control: Control) -> list[str]:
    return str(control.args.get("tags") or ",".join(MEMORY_TAGS)).split(",")


VERBS: Mapping[str, Verb] = {
    "flush_cache": flush_cache,
    "pins": pins,
    "unpin": unpin,
    "abort_all": abort_all,
    "pause": pause,
    "resume": resume,
    "stats": stats,
    "requests": requests,
    "update_weights": update_weights,
    "try_update_weights": partial(update_weights, is_trial=True),
    "release_memory": release_memory,
    "try_release_memory": partial(release_memory, is_trial=True),
    "resume_memory": resume_memory,
    "read_weight": read_weight,
    "attach_store": attach_store,
    "try_attach_store": partial(attach_store, is_trial=True),
    "detach_store": detach_store,
    "try_detach_store": partial(detach_store, is_trial=True),
    "start_profile": start_profile,
    "stop_profile": stop_profile,
    "start_expert_record": partial(record_experts, what="start"),
    "stop_expert_record": partial(record_experts, what="stop"),
    "dump_expert_record": partial(record_experts, what="dump"),
    "load_adapter": load_adapter,
    "unload_adapter": unload_adapter,
}


def answer(core: EngineCore, control: Control, now: float) -> Reply | None:
    """Carry out one verb; unknown ones are answered, not ignored."""
    verb = VERBS.get(control.verb)
    if verb is None:
        known = ", ".join(VERBS)
        return Reply(control.call, False, f"unknown verb {control.verb!r}; known: {known}")
    return verb(core, control, now)
