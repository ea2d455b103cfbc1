"""Control verbs that all replicas execute or none: each tries first while all are paused.

The ranks of one replica agree by themselves (runner/control_ops.py). Replicas share only this
client, so the client coordinates them.
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
    """Run a verb that has a trial form ("try_" + verb, engine/control.py).

    Args:
        is_paused: the caller has paused the engines and will resume them.

    Returns: the first refusal, or the first replica's reply.
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
