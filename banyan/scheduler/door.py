"""Which requests may join the queue; the others are refused with the reason."""

from banyan.base.errors import RequestError
from banyan.memory.cache import TOKEN_BYTES, KVCache
from banyan.messages.requests import Generate
from banyan.scheduler.adapters import Adapters, unknown_adapter
from banyan.scheduler.budget import Limits
from banyan.scheduler.roster import Roster


def check_request(
    generate: Generate,
    roster: Roster,
    cache: KVCache,
    limits: Limits,
    adapters: Adapters | None = None,
) -> None:
    """Raise RequestError when the request cannot be served here, or not now.

    A full queue makes room for a request of higher priority than its last one.
    """
    known = len(generate.tokens) // TOKEN_BYTES
    total = known + generate.sampling.max_new_tokens
    if roster.find(generate.request) is not None:
        raise RequestError(f"Duplicate request ID detected: {generate.request}", param="rid")
    if generate.adapter and adapters is None:
        raise unknown_adapter(generate.adapter, [])
    if not known:
        raise RequestError("The prompt is empty", hint="Send at least one token.")
    if total > limits.max_request_tokens:
        raise RequestError(
            f"{known} prompt tokens and {generate.sampling.max_new_tokens} new tokens are more "
            f"than the {limits.max_request_tokens} that one request may have",
            code="context_length_exceeded",
        )
    if not cache.fits_alone(total, limits.chunk_tokens):
        raise RequestError(
            f"{total} tokens do not fit in the cache", code="context_length_exceeded"
        )
    priorities = limits.priorities
    if generate.priority and priorities.refuse_when_off and not priorities.are_honoured:
        raise RequestError(
            f"The request brings priority {generate.priority}; priorities are switched off",
            param="priority",
            hint="Start the server with --enable-priority-scheduling.",
        )
    if limits.max_queued and len(roster.waiting) >= limits.max_queued:
        _make_room(roster, priorities.of(generate.priority))


def _make_room(roster: Roster, priority: int) -> None:
    """A request of which nothing was told gives its place in a full queue to a higher one."""
    last = roster.waiting[-1]
    if last.priority >= priority or last.admitted_s >= 0 or last.output_len:
        raise RequestError("The request queue is full.", status=503, code="queue_full")
    text = "The request is aborted by a higher priority request."
    roster.fail(last, 503, text, "queue_full")
