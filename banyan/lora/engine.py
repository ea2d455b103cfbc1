"""What the core does about adapters: what operators wish, the orders that come of it, their end.
Which adapter comes or goes is decided in `lora/scheduling.py`.
"""

from collections.abc import Sequence

from banyan.messages.control_ops import ControlOpReply
from banyan.messages.events import Reply
from banyan.messages.requests import LoadAdapter, RunControlOps, UnloadAdapter
from banyan.scheduler.scheduler import Scheduler


def change_adapters(scheduler: Scheduler, message: LoadAdapter | UnloadAdapter) -> None:
    """Take in what an operator wants; answered once it is done, or at once why it cannot be."""
    adapters, call = scheduler.adapters, message.call
    if adapters is None:
        text = "Adapters were not asked for: start with --enable-lora."
    elif isinstance(message, LoadAdapter):
        text = adapters.load(message.name, message.path, message.is_pinned, call)
    else:
        text = adapters.unload(message.name, call)
    if text:
        scheduler.request_table.events.append(Reply(call, False, text))


def wanted_adapters(scheduler: Scheduler) -> RunControlOps | None:
    """The orders that bring and take adapters, if any are due."""
    adapters, request_table = scheduler.adapters, scheduler.request_table
    if adapters is None:
        return None
    wanted = adapters.wanted(request_table.waiting, request_table.running)
    if wanted is None or wanted.ops:
        return wanted
    adapters.has_left(wanted.call)
    request_table.events.append(Reply(wanted.call, True, "The adapter has been unloaded."))
    return None


def end_adapters(
    scheduler: Scheduler,
    given: RunControlOps,
    ok: bool,
    replies: Sequence[ControlOpReply],
    text: str,
) -> str | None:
    """Control ops have ended: fail the requests whose adapter did not load.

    Args:
        replies: the ranks' replies to the applied ops, or to the one that failed.

    Returns:
        Error text for the caller; None if the ops will be issued again.
    """
    adapters, request_table = scheduler.adapters, scheduler.request_table
    if adapters is None:
        return text
    if ok:
        adapters.has_left(given.call)
        return text
    end = adapters.failed(max((reply.size_bytes for reply in replies), default=0))
    if end is None:
        return None
    text = end.text or text
    if end.name:
        for request in [r for r in request_table.waiting if r.generate.adapter == end.name]:
            request_table.fail(request, 400, f"The adapter {end.name!r} cannot be loaded: {text}")
    return text
