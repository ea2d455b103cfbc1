"""Verbs that all replicas carry out or none: each tries first, while none plans steps.

The ranks of one replica agree by themselves (runner/control_ops.py); replicas share nothing but the
front, so it is the front that asks them.
"""

from banyan.engine_client.client import Engines
from banyan.messages.events import Reply


async def agreed(
    engines: Engines,
    verb: str,
    timeout_s: float,
    is_paused: bool,
    **args: str | int | float | bool,
) -> Reply:
    """Carry out a verb that has a trial ("try_" in front of it, engine/control.py).

    Args:
        is_paused: somebody has paused the engines, and will let them go on.

    returns: the first refusal, or the yes of the first replica.
    """
    if sum(replica.alive for replica in engines.replicas()) < 2:
        return await engines.control(verb, timeout_s, **args)
    if not is_paused:
        await engines.control("pause")
    try:
        tried = await engines.control(f"try_{verb}", timeout_s, is_idle=not is_paused, **args)
        return await engines.control(verb, timeout_s, **args) if tried.ok else tried
    finally:
        if not is_paused:
            await engines.control("resume")
