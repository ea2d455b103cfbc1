"""Messages from an engine to the API process."""

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
    """float32: the pooled vector of the prompt, if requested."""
    hidden: bytes = b""
    """float32 [n, hidden]: hidden states after the last norm, of consecutive positions; or the
    experts that they chose, as `StepResult.hidden`."""
    hidden_first: int = 0
    """Absolute position of the first of them."""
    stored_tokens: int = 0
    """How many of the cached tokens came from the store."""
    cache_miss: str = ""
    """Why no more tokens were cached (kv_cache/misses.py); "" = all were."""


class DraftReport(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Draft statistics of one request."""

    steps: int = 0
    """Rows that began at the newest token. Each gave one token plus its accepted drafts."""
    proposed: int = 0
    correct: int = 0
    histogram: list[int] = []
    """Rows with 0, 1, 2 … accepted drafts."""


class Finished(msgspec.Struct, frozen=True, omit_defaults=True, tag="finished"):
    """The request finished. Exactly one `Finished` or `Failed` ends every request."""

    request: RequestId
    reason: str
    """"stop" | "length" | "abort"."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    matched: int = -1
    """Token id that ended it, -1 for none (length, abort, StopAt)."""
    retractions: int = 0
    queue_s: float = 0.0
    stored_tokens: int = 0
    cache_miss: str = ""
    drafts: DraftReport | None = None
    """None without speculative decoding."""


class Failed(msgspec.Struct, frozen=True, omit_defaults=True, tag="failed"):
    """The request failed alone. `status` is an HTTP status, `text` says what to do."""

    request: RequestId
    status: int
    text: str
    code: str = "engine_error"


BUSY = b"true"
"""Reply.body of a refusal that may succeed when repeated."""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True, tag="reply"):
    """Answer to one `Control`; `body` is JSON when the verb returns facts."""

    call: int
    ok: bool
    text: str = ""
    body: bytes = b""


class LiveRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One open request, in the reply to the verb "requests"."""

    request: RequestId
    phase: str
    """"queue" | "prefill" | "decode"."""
    prompt_tokens: int
    computed_tokens: int
    """Planned or computed positions, cached ones included."""
    cached_tokens: int
    output_tokens: int
    age_s: float
    """Seconds since the engine received it."""
    queue_s: float
    """Seconds in the queue."""
    retractions: int = 0


class PinFact(msgspec.Struct, frozen=True):
    """A pinned prefix, in the reply to the verb "pins"."""

    pin: RequestId
    tokens: int
    pages: int
    left_s: float
    priority: int = 0


class Ready(msgspec.Struct, frozen=True, omit_defaults=True, tag="ready"):
    """The engine can admit requests."""

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
    """Rows that began at a request's newest token, with speculative decoding."""
    proposed_drafts: int = 0
    correct_drafts: int = 0
    silent_rank: int = 0
    """The rank other than 0 with the oldest sign of life."""
    silent_s: float = 0.0
    """Seconds since that sign of life."""
    stored_tokens: int = 0
    """How many of the cached tokens came from a store."""
    open_rooms: int = 0
    """Open KV transfers with other servers."""
    pinned_pages: int = 0
    """Cached pages that are pinned (kv_cache/pins.py)."""
    adapters: int = 0
    """Loaded adapters."""
    adapter_bytes: int = 0
    """Memory of the adapters on the rank where they take most."""


def accept_length(stats: Stats) -> float | None:
    """Average tokens per verifying row; None without speculative decoding."""
    rows = stats.verify_rows
    return (rows + stats.correct_drafts) / rows if rows else None


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot go on; every open request has ended. Last message of an engine."""

    text: str
    exit_code: int = DeviceError.exit_code
    """Exit code for the server (base/errors.py)."""


Event = Tokens | Finished | Failed | Reply | Ready | Stats | Fatal
