"""Messages from an engine to a front."""

import msgspec

from banyan.base.errors import DeviceError
from banyan.base.ids import RequestId
from banyan.messages.plan import RowScores


class Tokens(msgspec.Struct, frozen=True, omit_defaults=True, tag="tokens"):
    """Newly decided output of one request, in order, without gaps or repeats."""

    request: RequestId
    first: int
    """Index of the first token within the output (0 = first generated token)."""
    tokens: bytes
    """int32 ids; empty when the event carries only prompt scores."""
    scores: list[RowScores] = []
    """Log-probabilities by absolute position (prompt positions included)."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache."""
    vector: bytes = b""
    """float32: the pooled vector of the prompt, when one was asked for."""
    hidden: bytes = b""
    """float32 [n, hidden]: hidden states after the last norm, of consecutive positions; or the
    experts that they chose, as `StepResult.hidden`."""
    hidden_first: int = 0
    """Absolute position of the first of them."""
    stored_tokens: int = 0
    """How many of the cached tokens came from the store."""
    cache_miss: str = ""
    """Why there were no more cached tokens (kv_cache/misses.py); "" = there were all."""


class DraftReport(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What the drafts of one request came to."""

    steps: int = 0
    """Rows that began at its newest token, each of which gave one token and its right drafts."""
    proposed: int = 0
    correct: int = 0
    histogram: list[int] = []
    """Rows with 0, 1, 2 … right drafts."""


class Finished(msgspec.Struct, frozen=True, omit_defaults=True, tag="finished"):
    """The request ended in order. Exactly one `Finished` or `Failed` ends every request."""

    request: RequestId
    reason: str
    """"stop" | "length" | "abort"."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    matched: int = -1
    """Token id that ended it, -1 for none (length, abort, the front's own StopAt)."""
    retractions: int = 0
    queue_s: float = 0.0
    stored_tokens: int = 0
    cache_miss: str = ""
    drafts: DraftReport | None = None
    """None when nothing drafts."""


class Failed(msgspec.Struct, frozen=True, omit_defaults=True, tag="failed"):
    """The request failed alone. `status` is an HTTP status, `text` says what to do."""

    request: RequestId
    status: int
    text: str
    code: str = "engine_error"


BUSY = b"true"
"""Reply.body of a refusal that may be a yes a moment later."""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True, tag="reply"):
    """Answer to one `Control`; `body` is JSON when the verb returns facts."""

    call: int
    ok: bool
    text: str = ""
    body: bytes = b""


class LiveRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request that has not ended, as the verb "requests" tells of it."""

    request: RequestId
    phase: str
    """"queue" | "prefill" | "decode"."""
    prompt_tokens: int
    computed_tokens: int
    """Positions that are planned or computed, what the cache gave included."""
    cached_tokens: int
    output_tokens: int
    age_s: float
    """Since the engine has it."""
    queue_s: float
    """How long it has waited for a place, or is waiting."""
    retractions: int = 0


class PinFact(msgspec.Struct, frozen=True):
    """A prefix whose pages stay, as the verb "pins" tells of it."""

    pin: RequestId
    tokens: int
    pages: int
    left_s: float
    priority: int = 0


class Ready(msgspec.Struct, frozen=True, omit_defaults=True, tag="ready"):
    """The engine can admit requests. Facts the front needs and people read."""

    max_total_tokens: int
    """Tokens the KV cache holds."""
    max_request_tokens: int
    """Longest prompt + output that one request may have."""
    max_running: int
    facts: bytes = b"{}"
    """JSON: start-up phases in seconds, memory plan, kernel table, device."""


class Stats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stats"):
    """Heartbeat, at least once a second while the loop lives. Counters never go down."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    total_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    held_pages: int = 0
    in_flight_pages: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    """Prompt and output positions that went through the model."""
    retractions: int = 0
    finished: int = 0
    failed: int = 0
    step_age_s: float = 0.0
    """Seconds since the oldest unfinished step was launched; 0 when none is in flight."""
    leaked: int = 0
    verify_rows: int = 0
    """Rows that began at a request's newest token, where tokens are drafted."""
    proposed_drafts: int = 0
    correct_drafts: int = 0
    silent_rank: int = 0
    """The rank other than 0 that has given no sign of life for longest."""
    silent_s: float = 0.0
    """For how many seconds it has not."""
    stored_tokens: int = 0
    """How many of the cached tokens came from a store."""
    open_rooms: int = 0
    """Where pages are kept for another server, or waited for."""
    pinned_pages: int = 0
    """Of the cached ones, those that stay for a time (kv_cache/pins.py)."""
    adapters: int = 0
    """In memory."""
    adapter_bytes: int = 0
    """Of memory that they take on the rank where they take most."""


def accept_length(stats: Stats) -> float | None:
    """Tokens that each of these rows gave, on average; None when nothing is drafted."""
    rows = stats.verify_rows
    return (rows + stats.correct_drafts) / rows if rows else None


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot go on; every open request has ended. Last message of an engine."""

    text: str
    exit_code: int = DeviceError.exit_code
    """What the server that serves it should end with (base/errors.py)."""


Event = Tokens | Finished | Failed | Reply | Ready | Stats | Fatal
