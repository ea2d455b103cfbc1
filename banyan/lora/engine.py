"""What the core does about adapters: what operators wish, the orders that come of it, their end.
Which adapter comes or goes is decided in `lora/scheduling.py`.
"""

from collections.abc import Sequence

from banyan.messages.control_ops import OrderReply
from banyan.messages.events import Reply
from banyan.messages.requests import GiveOrders, LoadAdapter, UnloadAdapter
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
        scheduler.roster.events.append(Reply(call, False, text))


def wanted_adapters(scheduler: Scheduler) -> GiveOrders | None:
    """The orders that bring and take adapters, if any are due."""
    adapters, roster = scheduler.adapters, scheduler.roster
    if adapters is None:
        return None
    wanted = adapters.wanted(roster.waiting, roster.running)
    if wanted is None or wanted.orders:
        return wanted
    adapters.has_left(wanted.call)
    roster.events.append(Reply(wanted.call, True, "The adapter has been unloaded."))
    return None


def end_adapters(
    scheduler: Scheduler, given: GiveOrders, ok: bool, told: Sequence[OrderReply], text: str
) -> str | None:
    """Orders have ended: whoever waits for an adapter that did not come is told why.

    Args:
        told: what the ranks said about orders that were carried out, or about the one that was not.

    Returns:
        What whoever gave them is told; None where they will be given again.
    """
    adapters, roster = scheduler.adapters, scheduler.roster
    if adapters is None:
        return text
    if ok:
        adapters.has_left(given.call)
        return text
    end = adapters.failed(max((reply.size_bytes for reply in told), default=0))
    if end is None:
        return None
    text = end.text or text
    if end.name:
        for request in [r for r in roster.waiting if r.generate.adapter == end.name]:
            roster.fail(request, 400, f"The adapter {end.name!r} cannot be loaded: {text}")
    return text
