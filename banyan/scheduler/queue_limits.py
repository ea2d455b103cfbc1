"""Which requests may join the queue; the others are refused with the reason."""

from banyan.base.errors import RequestError
from banyan.kv_cache.cache import TOKEN_BYTES, KVCache
from banyan.lora.scheduling import Adapters, unknown_adapter
from banyan.messages.requests import Generate
from banyan.scheduler.budget import Limits
from banyan.scheduler.request import Request
from banyan.scheduler.request_table import RequestTable


def check_request(
    generate: Generate,
    request_table: RequestTable,
    cache: KVCache,
    limits: Limits,
    adapters: Adapters | None = None,
) -> None:
    """Raise RequestError when the request cannot be served here, or not now.

    A full queue makes room for a request of higher priority than its last one.
    """
    known = len(generate.tokens) // TOKEN_BYTES
    total = known + generate.sampling.max_new_tokens
    if request_table.find(generate.request) is not None:
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
    if limits.max_queued or limits.max_queued_tokens:
        _make_room(request_table, limits, known, priorities.of(generate.priority))


def _make_room(request_table: RequestTable, limits: Limits, known: int, priority: int) -> None:
    """Requests of which nothing was told give their places in a full queue to a higher one, the
    last of them first; none does where that is not enough. `known`: tokens of the new prompt."""
    number = len(request_table.waiting)
    tokens = sum(r.prompt_len for r in request_table.waiting) if limits.max_queued_tokens else 0
    leaving: list[Request] = []
    for last in reversed(request_table.waiting):
        if _has_capacity(limits, number, tokens + known):
            break
        if last.priority >= priority or last.admitted_s >= 0 or last.output_len:
            raise RequestError("The request queue is full.", status=503, code="queue_full")
        leaving.append(last)
        number, tokens = number - 1, tokens - last.prompt_len
    for last in leaving:
        text = "The request is aborted by a higher priority request."
        request_table.fail(last, 503, text, "queue_full")


def _has_capacity(limits: Limits, waiting: int, tokens: int) -> bool:
    """Whether one more may wait beside so many, all of them with so many tokens. Where nobody waits
    there is room for any prompt, else a long one would never be taken."""
    if limits.max_queued and waiting >= limits.max_queued:
        return False
    return not waiting or not limits.max_queued_tokens or tokens <= limits.max_queued_tokens
