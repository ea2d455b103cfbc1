"""Administrative verbs, one function each.

A verb returns its Reply, or None if it has started control ops: then the Reply follows when every
rank has executed them.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice

import msgspec

from banyan.base.ids import RequestId
from banyan.engine.core import EngineCore
from banyan.messages.control_ops import (
    MEMORY_TAGS,
    USUAL_TAGS,
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
from banyan.messages.events import BUSY, LiveRequest, PinFact, Reply
from banyan.messages.requests import (
    Abort,
    Control,
    LoadAdapter,
    RetractAll,
    RunControlOps,
    UnloadAdapter,
    Unpin,
)
from banyan.scheduler.request import RUNNING, Request

Verb = Callable[[EngineCore, Control, float], Reply | None]


def flush_cache(core: EngineCore, control: Control, now: float) -> Reply | None:
    """Empty the prefix cache and the tables for n-gram drafts.

    Refused while there are requests, unless they wait for the end of a pause. `pinned`: also drop
    pinned prefixes.
    """
    stats = core.stats(now)
    if control.args.get("pinned") and (core.is_paused or not stats.running + stats.waiting):
        core.receive(Unpin(), now)
    if (core.is_paused or not stats.waiting) and core.flush(now):
        if core.scheduler.speculation is not None:
            return _start(core, control, now, ForgetDrafts())
        return Reply(control.call, True, "Cache flushed.")
    return Reply(
        control.call,
        False,
        f"Cache not flushed: {stats.running} running and {stats.waiting} waiting requests.",
    )


def pins(core: EngineCore, control: Control, now: float) -> Reply:
    """The pinned prefixes as JSON (PinFact)."""
    facts = [
        PinFact(RequestId(pin.name), pin.tokens, pin.num_pages, pin.until_s - now, pin.priority)
        for pin in core.scheduler.cache.pins.alive(now)
    ]
    return Reply(control.call, True, body=msgspec.json.encode(facts))


def unpin(core: EngineCore, control: Control, now: float) -> Reply:
    """Remove one pin, or all of them; replies with the number removed."""
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
    """Stop planning steps. `retract`: running requests release their pages and recompute later;
    otherwise they keep them."""
    core.is_paused = True
    if control.args.get("retract"):
        core.receive(RetractAll(), now)
    return Reply(control.call, True, "Generation paused.")


def resume(core: EngineCore, control: Control, now: float) -> Reply:
    """Continue planning steps."""
    core.is_paused = False
    return Reply(control.call, True, "Generation continues.")


def stats(core: EngineCore, control: Control, now: float) -> Reply:
    """Counters and memory use as JSON."""
    return Reply(control.call, True, body=msgspec.json.encode(core.stats(now)))


def requests(core: EngineCore, control: Control, now: float) -> Reply:
    """The first `limit` requests as JSON: running, then waiting ones in queue order."""
    request_table = core.scheduler.request_table
    found = islice(
        chain(request_table.running, request_table.waiting), int(control.args.get("limit", 0))
    )
    body = msgspec.json.encode([_live(request, now) for request in found])
    return Reply(control.call, True, body=body)


def update_weights(
    core: EngineCore, control: Control, now: float, is_trial: bool = False
) -> Reply | None:
    """Load the weights of another checkpoint on every rank, or on none."""
    flushes = bool(control.args.get("flush_cache", True))
    running = core.stats(now).running
    if refusal := _with_dp_attention(core, control) or _while_requests_live(core, control, now):
        return refusal
    if flushes and running:
        return Reply(
            control.call,
            False,
            f"{running} requests hold pages of the old weights. Pause by retract, or send "
            "flush_cache false to let them keep those.",
        )
    path = str(control.args.get("path"))
    return _start(core, control, now, TakeWeights(path, secrets.token_hex(8), flushes, is_trial))


def release_memory(
    core: EngineCore, control: Control, now: float, is_trial: bool = False
) -> Reply | None:
    """Release memory to the system. No rows are planned until all of it is restored."""
    refusal = _with_dp_attention(core, control) or _while_requests_live(core, control, now)
    return refusal or _start(
        core, control, now, ReleaseMemory(_tags(control, USUAL_TAGS), is_trial)
    )


def resume_memory(core: EngineCore, control: Control, now: float) -> Reply | None:
    """Restore released memory."""
    refusal = _with_dp_attention(core, control)
    return refusal or _start(core, control, now, ResumeMemory(_tags(control, MEMORY_TAGS)))


def read_weight(core: EngineCore, control: Control, now: float) -> Reply | None:
    """Read the first rows of one tensor of the served checkpoint."""
    name, rows = str(control.args.get("name")), int(control.args.get("rows") or 1)
    return _start(core, control, now, ReadWeight(name, rows))


def attach_store(
    core: EngineCore, control: Control, now: float, is_trial: bool = False
) -> Reply | None:
    """Attach a store of cache pages on every rank, or on none."""
    tier, args = core.scheduler.cache.tier, control.args
    if tier is None:
        text = "This server was not started for a store. Start it with --enable-hierarchical-cache."
        return Reply(control.call, False, text)
    if tier.is_attached:
        return Reply(control.call, False, "A store is attached already. Detach it first.")
    if core.scheduler.cache.weights != tier.weights:
        text = "Other weights were taken since the start, whose pages no store keeps. Start again."
        return Reply(control.call, False, text)
    op = AttachStore(
        store=str(args.get("store")),
        options=str(args.get("options") or "{}").encode(),
        write=str(args.get("write")),
        prefetch=str(args.get("prefetch")),
        threshold=int(args.get("threshold") or 0),
        timeout_s=float(args.get("patience_s") or 0.0),
        timeout_per_ki_s=float(args.get("patience_per_ki_s") or 0.0),
        is_trial=is_trial,
    )
    return _while_requests_run(core, control, now) or _start(core, control, now, op)


def detach_store(
    core: EngineCore, control: Control, now: float, is_trial: bool = False
) -> Reply | None:
    """Detach the store. `force`: drop pages that are not written yet."""
    tier = core.scheduler.cache.tier
    if tier is None or not tier.is_attached:
        return Reply(control.call, True, "There was no store.")
    if refusal := _while_requests_run(core, control, now):
        return refusal
    loading, pending = len(tier.loading), 0 if control.args.get("force") else tier.pending
    if loading or pending:
        text = (
            f"{loading} pages are on their way from the store and {pending} on their way to it"
            f"{'' if loading else '; force=true leaves these out'}."
        )
        return Reply(control.call, False, text, body=BUSY)
    return _start(core, control, now, DetachStore(is_trial))


def start_profile(core: EngineCore, control: Control, now: float) -> Reply | None:
    """Start the profiler on every rank."""
    op = StartProfile(
        folder=str(control.args.get("output_dir") or ""),
        prefix=str(control.args.get("profile_prefix") or ""),
        time_us=time.time_ns() // 1000,
        steps=int(control.args.get("num_steps") or 0),
    )
    return _start(core, control, now, op)


def stop_profile(core: EngineCore, control: Control, now: float) -> Reply | None:
    """Stop the profiler; every rank writes one file."""
    return _start(core, control, now, StopProfile())


def record_experts(core: EngineCore, control: Control, now: float, what: str) -> Reply | None:
    """Start or stop recording the chosen experts, or dump the record (`what`)."""
    return _start(core, control, now, RecordExperts(what, time.time_ns() // 1000))


def load_adapter(core: EngineCore, control: Control, now: float) -> Reply | None:
    """Load an adapter under a name; the reply comes when every rank has it, or none."""
    if refusal := _with_dp_attention(core, control):
        return refusal
    name, path = str(control.args.get("name")), str(control.args.get("path"))
    core.receive(LoadAdapter(control.call, name, path, bool(control.args.get("pinned"))), now)
    return None


def unload_adapter(core: EngineCore, control: Control, now: float) -> Reply | None:
    """Unload an adapter; the reply comes when its last request has ended."""
    if refusal := _with_dp_attention(core, control):
        return refusal
    core.receive(UnloadAdapter(control.call, str(control.args.get("name"))), now)
    return None


def _start(core: EngineCore, control: Control, now: float, op: ControlOp) -> None:
    core.receive(RunControlOps(control.call, [op]), now)


def _with_dp_attention(core: EngineCore, control: Control) -> Reply | None:
    """A refusal with DP attention: other replicas use the same weights in the same steps."""
    if not core.uses_dp_attention:
        return None
    text = "Weights, adapters and memory stay as they are while replicas share feed-forward blocks."
    return Reply(control.call, False, f"{text} Start again.")


def _while_requests_live(core: EngineCore, control: Control, now: float) -> Reply | None:
    """A refusal while there are requests, unless a pause or released memory keeps them waiting.

    `is_idle`: the caller has paused the engine itself, so its pause does not count.
    """
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
    """A refusal while requests run, or wait without a pause."""
    stats = core.stats(now)
    is_held = core.is_paused and not control.args.get("is_idle")
    if not stats.running and (is_held or not stats.waiting):
        return None
    text = (
        f"{stats.running} running and {stats.waiting} waiting requests. A store is attached and "
        "detached while there are none."
    )
    return Reply(control.call, False, text)


def _tags(control: Control, default: Sequence[str]) -> list[str]:
    return str(control.args.get("tags") or ",".join(default)).split(",")


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
    """Execute one verb. An unknown verb gets a reply that lists the known ones."""
    verb = VERBS.get(control.verb)
    if verb is None:
        known = ", ".join(VERBS)
        return Reply(control.call, False, f"unknown verb {control.verb!r}; known: {known}")
    return verb(core, control, now)


def _live(request: Request, now: float) -> LiveRequest:
    phase = "decode" if request.is_decoding else "prefill"
    stats = request.stats
    admitted_s = now if stats.admitted_s is None else stats.admitted_s
    return LiveRequest(
        request=request.id,
        phase=phase if request.state == RUNNING else "queue",
        prompt_tokens=request.prompt_len,
        computed_tokens=request.planned,
        cached_tokens=stats.cached_tokens,
        output_tokens=request.output_len,
        age_s=max(0.0, now - stats.submitted_s),
        queue_s=max(0.0, admitted_s - stats.submitted_s),
        retractions=stats.retractions,
    )
