"""Messages from a front to an engine."""

import msgspec

from banyan.base.ids import RequestId
from banyan.messages.control_ops import ControlOp
from banyan.messages.sampling_params import SamplingParams

NO_SCORES = -1
"""`score_from` of a request that wants no log-probabilities."""
NO_HIDDEN = -1
"""`hidden_from` of a request that wants no hidden states."""


NO_CALL = 0
"""`RunControlOps.call` of orders that nobody asked for: calls are counted from 1."""


class Generate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"):
    """Continue `tokens`. Answered by `Tokens`… and one `Finished` or `Failed`."""

    request: RequestId
    tokens: bytes
    """Prompt, int32 little-endian."""
    sampling: SamplingParams
    origin: str = ""
    """Which front asked, when an engine serves several."""
    namespace: bytes = b""
    """Prefix-cache namespace (tenant salt, extra key): only equal namespaces share pages."""
    adapter: str = ""
    """Name of the adapter that answers; "" = the model by itself."""
    priority: int = 0
    score_from: int = NO_SCORES
    """First position whose token's log-probability is wanted; prompt length = output only."""
    score_top: int = 0
    """How many best alternatives to report at each scored position."""
    score_ids: tuple[int, ...] = ()
    """Token ids whose log-probability is reported at each scored position."""
    grammar: str = ""
    """What the output must look like (messages/constraint.py); "" for anything."""
    pool: bool = False
    """The pooled vector of the prompt is wanted; max_new_tokens is 0 then."""
    hidden_from: int = NO_HIDDEN
    """First position whose hidden state is wanted."""
    wants_experts: bool = msgspec.field(name="tells_experts", default=False)
    """The experts chosen at the positions from `hidden_from` on are wanted, not their states."""
    caller: bytes = b""
    """Whose share of the steps, and of the time that constraints take to compile, it is part of."""
    weight: float = 1.0
    """Of that share against those of others."""
    embeds: bytes = b""
    """float32 [prompt, hidden] in place of the prompt's tokens, which are placeholders then."""
    room: bytes = b""
    """Where one server hands it over to another (messages/disaggregation.py); b"" = nowhere."""
    peer: str = ""
    """host:port of the server that hands it over."""
    replica: int = -1
    """Which replica takes it; -1 = whichever is chosen."""
    prefill_replica: int = msgspec.field(name="giver", default=-1)
    """Replica of the prefill server that computes the prompt; -1 = chosen by the room."""
    stream_interval: int = msgspec.field(name="stride", default=0)
    """Least tokens per chunk for its reader; 0 = everything at the end."""
    pin_s: float = 0.0
    """Once it has ended, the whole pages of its prompt stay for so long; 0 = as any others."""
    pin_priority: int = 0
    """What is pinned with a lower one gives way first."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client has gone or asked to stop: end it at any state. Unknown ids do nothing."""

    request: RequestId


class StopAt(msgspec.Struct, frozen=True, tag="stop_at"):
    """The front's verdict on stop strings and regexes: keep `length` output tokens and finish."""

    request: RequestId
    length: int


class RetractAll(msgspec.Struct, frozen=True, tag="retract_all"):
    """Take the pages of every running request back; each waits and recomputes later."""


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """Let the pages go that a request had pinned; "" = those of all."""

    request: RequestId = RequestId("")


class RunControlOps(msgspec.Struct, frozen=True, tag="give_orders"):
    """Let every rank carry these out between two steps; answered by one `Reply`."""

    call: int
    """NO_CALL = nobody is answered."""
    orders: list[ControlOp]


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Take an adapter that requests may name from then on; answered by one `Reply`."""

    call: int
    name: str
    path: str
    is_pinned: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Forget an adapter once its requests have ended; answered by one `Reply`."""

    call: int
    name: str


class Control(msgspec.Struct, frozen=True, omit_defaults=True, tag="control"):
    """An administrative verb (engine/control.py), answered by one `Reply` with the same call."""

    call: int
    verb: str
    origin: str = ""
    args: dict[str, str | int | float | bool] = {}


Message = Generate | Abort | StopAt | Control
