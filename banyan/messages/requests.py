"""Messages from the API process to an engine. Constraint: the required form of an output, encoded
as one string (`Generate.grammar`):

    kind:text             kind@id,id,…:text             kind@id,id,…#budget#id,id,…:text

With ids the constraint begins after that sequence of tokens (the end of the thinking); what comes
before is free. With a budget the sequence is forced after so many tokens, if the output begins
with the last ids (the start of the thinking). Equal constraints are equal strings, so they share
one compilation.
"""

import msgspec

from banyan.base.ids import RequestId
from banyan.messages.control_ops import ControlOp
from banyan.messages.sampling_params import SamplingParams
from banyan.messages.spans import Content, Span

NO_SCORES = -1
"""`score_from` of a request that wants no log-probabilities."""
ANY_REPLICA = -1
"""`replica` and `prefill_replica` of a request that names none."""
NO_CALL = 0
"""`RunControlOps.call` of operations that need no reply. Calls are counted from 1."""
NO_HIDDEN = -1
"""`hidden_from` of a request that wants no hidden states."""


JSON_SCHEMA = "json_schema"
"""A JSON Schema, as JSON."""
REGEX = "regex"
"""The whole output matches."""
EBNF = "ebnf"
"""A grammar in GBNF notation; its start is the rule "root"."""
STRUCTURAL_TAG = "structural_tag"
"""{"type": "structural_tag", "format": …}: free text with constrained tagged parts."""

KINDS = (JSON_SCHEMA, REGEX, EBNF, STRUCTURAL_TAG)
FREE = "free"
"""Any output; only the beginning has a budget."""


class Constraint(msgspec.Struct, frozen=True):
    """One constraint; `text` is in the notation of its kind."""

    kind: str
    text: str
    after: tuple[int, ...] = ()
    """Token ids that end the unconstrained beginning; () = constrained from the start."""
    budget: int = 0
    """Tokens of the beginning, after which `after` is forced; 0 = as many as it takes."""
    opening: tuple[int, ...] = ()
    """The budget holds if the output begins with these ids; () = it always holds."""

    def encode(self) -> str:
        ids = "@" + ",".join(map(str, self.after)) if self.after else ""
        if self.budget:
            ids += f"#{self.budget}#{','.join(map(str, self.opening))}"
        return f"{self.kind}{ids}:{self.text}"

    @classmethod
    def decode(cls, encoded: str) -> "Constraint":
        """The inverse of `encode`; ValueError when `encoded` is not of that form."""
        head, colon, text = encoded.partition(":")
        kind, _, ids = head.partition("@")
        ids, _, bound = ids.partition("#")
        budget, _, opening = bound.partition("#")
        if not colon or kind not in (*KINDS, FREE):
            raise ValueError(f"no constraint begins with {head[:40]!r}; known: {', '.join(KINDS)}")
        after, first = (tuple(map(int, t.split(","))) if t else () for t in (ids, opening))
        return cls(kind, text, after, int(budget or 0), first)


class Generate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"):
    """Continue `tokens`. Answered by `Tokens`… and one `Finished` or `Failed`."""

    request: RequestId
    tokens: bytes
    """Prompt, int32 little-endian."""
    sampling: SamplingParams
    origin: str = ""
    """Which API process sent it, when an engine serves several."""
    namespace: bytes = b""
    """Prefix-cache namespace (tenant salt, extra key): only equal namespaces share pages."""
    adapter: str = ""
    """Name of the LoRA adapter; "" = the base model."""
    priority: int = 0
    score_from: int = NO_SCORES
    """First position whose token's log-probability is wanted; prompt length = output only."""
    score_top: int = 0
    """How many best alternatives to report at each scored position."""
    score_ids: tuple[int, ...] = ()
    """Token ids whose log-probability is reported at each scored position."""
    grammar: str = ""
    """Encoded `Constraint` on the output; "" = unconstrained."""
    pool: bool = False
    """Return the pooled vector of the prompt; max_new_tokens is then 0."""
    hidden_from: int = NO_HIDDEN
    """First position whose hidden state is wanted."""
    wants_experts: bool = msgspec.field(name="tells_experts", default=False)
    """From `hidden_from` on, return the chosen experts of each position instead of its state."""
    caller: bytes = b""
    """Key of the caller for fair scheduling and for its share of grammar compile time."""
    weight: float = 1.0
    """The caller's share relative to other callers."""
    transfer_id: bytes = msgspec.field(name="room", default=b"")
    """Id of the KV transfer between a prefill and a decode server (messages/disaggregation.py);
    b"" = no disaggregation."""
    prefill_address: str = msgspec.field(name="peer", default="")
    """host:port of the prefill server."""
    replica: int = ANY_REPLICA
    """Index of the replica that runs the request; -1 = load balancing decides."""
    prefill_replica: int = msgspec.field(name="giver", default=ANY_REPLICA)
    """Index of the replica on the prefill server; -1 = the one that `transfer_id` maps to."""
    stream_interval: int = msgspec.field(name="stride", default=0)
    """Report tokens in pieces of at least this many; 0 = only at the end."""
    pin_s: float = 0.0
    """Seconds that the whole pages of the prompt stay cached after the end; 0 = not pinned."""
    pin_priority: int = 0
    """Pins with a lower priority are dropped first when a request needs their pages."""
    spans: tuple[Span, ...] = ()
    """Stretches of the prompt that are given by content, in order; `tokens` has the ids of
    `place_ids` there."""
    contents: tuple[Content, ...] = ()
    """What the spans take their features from, each once."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request in any state; the client left or asked to stop. Unknown ids are ignored."""

    request: RequestId


class StopAt(msgspec.Struct, frozen=True, tag="stop_at"):
    """A stop string or regex matched: keep `length` output tokens and finish."""

    request: RequestId
    length: int


class RetractAll(msgspec.Struct, frozen=True, tag="retract_all"):
    """Retract every running request; each returns to the queue and recomputes later."""


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """Drop the pin of a request; "" = all pins."""

    request: RequestId = RequestId("")


class RunControlOps(msgspec.Struct, frozen=True, tag="give_orders"):
    """Run these operations on every rank between two steps; answered by one `Reply`."""

    call: int
    """NO_CALL = no reply."""
    ops: list[ControlOp] = msgspec.field(name="orders")


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Register a LoRA adapter that requests may then name; answered by one `Reply`."""

    call: int
    name: str
    path: str
    is_pinned: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Unregister an adapter after its requests have ended; answered by one `Reply`."""

    call: int
    name: str


class Control(msgspec.Struct, frozen=True, omit_defaults=True, tag="control"):
    """An administrative verb (engine/control.py); answered by one `Reply` with the same call."""

    call: int
    verb: str
    origin: str = ""
    args: dict[str, str | int | float | bool] = {}


Message = Generate | Abort | StopAt | Control
