"""The step border: StepPlan from engine to runner, StepResult back. Nothing else passes between
them.

Ranks apply a plan in this order: control ops, leaves, joins, grants, copies "before", contents,
pieces, rows, copies "after". A plan with control ops runs alone: no other plan is in flight with
it.

Token ids travel as int32 little-endian bytes, log-probabilities as float32 little-endian bytes,
masks as little-endian bits (bit i of the string = token i is allowed).
"""

import struct

import msgspec

from banyan.base.ids import NO_STEP, PADDING_PAGE, PageId, SlotId, StepId
from banyan.messages.control_ops import ControlOp, ControlOpReply
from banyan.messages.sampling_params import SamplingParams

SAMPLE = 1
"""Row.want: choose the token after the row's last position."""
SCORE = 2
"""Row.want: report log-probabilities of the tokens at positions ≥ Row.score_from."""
POOL = 4
"""Row.want: report the pooled vector of the row."""
HIDDEN = 8
"""Row.want: report the hidden states of the row's positions ≥ Row.hidden_from."""
EXPERTS = 16
"""Row.want: report the experts chosen at those positions instead of their states."""
DEVICE = "device"
"""PageAt.tier: the pages that rows read and write."""
STORE = "store"
"""PageAt.tier: pages that outlive the process."""
PEER = "peer"
"""PageAt.tier: pages sent from a prefill to a decode server (messages/disaggregation.py)."""


class Row(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One request in one step: run positions start … start+count−1 of its slot.

    Positions below the slot's known length take the tokens from Join or `given`. The position after
    the last known one takes the token that the runner sampled last. With drafts in flight `start`
    is an upper bound that only serves to grant pages: the runner keeps the true length.
    """

    slot: SlotId
    start: int
    count: int
    drafts: int = 0
    """How many of `count` are draft tokens to verify: the first ones of the runner's last result,
    chain or tree. An upper bound like `start`: the row is shorter if the runner had fewer. In a
    multi-step plan (StepPlan.steps) they are the tokens that the model samples step by step."""
    given: bytes = b""
    """int32 ids for positions start …; only while nothing of this slot is in flight."""
    want: int = 0
    score_from: int = 0
    masked: bool = False
    """Sampling waits for this row's masks: drafts + 1 of them."""
    hidden_from: int = 0
    propose: int = 0
    """Most tokens to draft after the sampled ones; they come with the row's result. The slot has
    pages for this many extra positions, which a drafter with its own KV cache writes."""


class PlacedSpan(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A span of a request's prompt (messages/spans.py), as a Join describes it."""

    first: int
    count: int
    content: int
    """Number of the content whose feature rows the places take; 0 = no row of the join needs
    them."""
    offset: int
    shape: tuple[int, int, int]
    is_mutual: bool = False
    token: int = -1
    """As `Span.token`; negative = None."""


_spans_decoder = msgspec.msgpack.Decoder(list[PlacedSpan])


def encode_spans(spans: list[PlacedSpan]) -> bytes:
    """The value of `Join.spans`."""
    return msgspec.msgpack.encode(spans) if spans else b""


class Join(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A request takes a slot. After a retraction `tokens` holds prompt + output so far."""

    slot: SlotId
    tokens: bytes
    prompt_len: int
    sampling: SamplingParams
    score_top: int = 0
    score_ids: tuple[int, ...] = ()
    adapter: int = 0
    spans: bytes = b""
    """Stretches of the prompt that take feature rows (`encode_spans`); `tokens` is negative there.
    In bytes, so that the hash of a plan without any is as before (engine/journal.py)."""
    namespace: bytes = b""
    """Prefix-cache namespace. N-gram drafts come only from requests of the same namespace."""

    @property
    def placed(self) -> list[PlacedSpan]:
        """The spans, in order."""
        return _spans_decoder.decode(self.spans) if self.spans else []


class NewContent(msgspec.Struct, frozen=True, array_like=True):
    """A content that later parts of the plan, or of later plans, call by its number. Numbers are
    not used again."""

    content: int
    digest: bytes
    kind: str
    grid: tuple[int, int, int]
    rows: int
    data: bytes = b""
    """The engine loop puts it in: the core knows digests and sizes only."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Work that makes features: run blocks first_block … first_block + blocks - 1 of the tower over
    one content. With the last block its feature rows are there for the rows of the same plan."""

    content: int
    first_block: int
    blocks: int


class PageGrant(msgspec.Struct, frozen=True, array_like=True):
    """table[slot, group][first:first+len(pages)] = pages."""

    slot: SlotId
    group: int
    first: int
    pages: list[PageId]


class PageAt(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Location of one page of a group: DEVICE by page number, STORE by content key, PEER by
    transfer id and position."""

    tier: str
    page: PageId = PADDING_PAGE
    key: bytes = b""


class PageCopy(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Copy one page of `group`. Rows of this plan see a "before" copy; "after" copies see their
    writes.

    CopyResult reports the end, possibly later than the step's own result. If a "before" copy that
    is bound to a row fails, the runner reports that row as failed too.

    A copy to or from a store or a peer is always "before" and bound to no row. On the way out the
    bytes are read at once, so the plan's rows may write the page; the copy ends when the bytes are
    stored. On the way in no request uses the page before the copy has ended.
    """

    id: int
    group: int
    src: PageAt
    dst: PageAt
    when: str
    row: int = -1
    """Index into StepPlan.rows, or -1 when bound to no row."""

    @property
    def is_on_device(self) -> bool:
        """The copy ends with its step. The mover reports the end of all others."""
        return self.src.tier == self.dst.tier == DEVICE


class Lookup(msgspec.Struct, frozen=True, array_like=True):
    """Ask the store which pages it holds. Sent to the mover between plans; one Held replies."""

    id: int
    keys: list[bytes]


class Held(msgspec.Struct, frozen=True, omit_defaults=True, tag="held"):
    """Reply to a Lookup: how many keys, from the first, the store holds in every group. Reaches the
    engine through receive(); needs no step."""

    id: int
    count: int


class Mask(msgspec.Struct, frozen=True, array_like=True):
    """Allowed tokens of one masked row: drafts + 1 bit masks, one after another.

    b"" means no constraint: the row became void while it waited.
    """

    step: StepId
    row: int
    bits: bytes


class StepLoad(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The load of one replica in a step that several replicas run together (DP attention)."""

    tokens: int
    outputs: int = 0
    """Most tokens it may sample."""
    scores: int = 0
    """Most positions of known tokens it scores."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The work of one step. Only the engine assigns slots and pages and orders the rows."""

    step: StepId
    leaves: list[SlotId] = []
    joins: list[Join] = []
    grants: list[PageGrant] = []
    copies: list[PageCopy] = []
    rows: list[Row] = []
    masks: list[Mask] = []
    """Masks that are known already. EngineCore.complete() returns those that depend on tokens in
    flight."""
    replica_loads: list[StepLoad] = []
    """With DP attention: the load of each replica, as agreed; [] otherwise."""
    control_ops: list[ControlOp] = []
    """Run in order; after one fails, the rest are skipped."""
    steps: int = 1
    """More than 1 = multi-step decode: at most this many decode steps without the engine. Each row
    is its request's newest token and at most steps - 1 drafts. All rows end together: with the
    shortest row, at a sampled stop id, at a failure, or when the engine interrupts."""
    report_every: int = 0
    """Multi-step decode: report tokens after every this many steps; 0 = only at the end."""
    forget: list[int] = []
    """Contents whose features, or whose begun work, are dropped before anything else."""
    contents: list[NewContent] = []
    pieces: list[Piece] = []
    """Run before the rows."""


class RowScores(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Log-probabilities of consecutive positions of one request."""

    row: int
    """Index into StepPlan.rows; -1 in events to the API process."""
    first: int
    """Absolute position of the first scored token."""
    logprobs: bytes
    """float32 [n]."""
    top_ids: bytes = b""
    """int32 [n, top]."""
    top_logprobs: bytes = b""
    """float32 [n, top]."""
    picked: bytes = b""
    """float32 [n, len(score_ids)]."""


NOT_FINITE = "the model gave logits that are not finite numbers"
"""RowFailure.text of a row with NaN or infinite logits."""


class RowFailure(msgspec.Struct, frozen=True, array_like=True):
    """One row failed; the other rows of the step are valid."""

    row: int
    text: str
    status: int = 500
    """HTTP status for the client: 400 when the request itself is at fault."""


class PieceFailure(msgspec.Struct, frozen=True, array_like=True):
    """A content cannot become features; the requests that need it fail, the others go on."""

    content: int
    text: str
    status: int = 500


class StepResult(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Outcome of one plan. If the whole step failed, only `error` is set."""

    step: StepId = NO_STEP
    tokens: list[bytes] = []
    """int32 ids per row: empty without SAMPLE; 1 … drafts+1 ids after a verify row: the accepted
    drafts, then the model's next token."""
    drafts: list[bytes] = []
    """int32 ids per row that the runner will verify next; [] without a drafter."""
    scores: list[RowScores] = []
    failed: list[RowFailure] = []
    error: str = ""
    seconds: float = 0.0
    vectors: list[bytes] = []
    """float32 per row, empty without POOL; [] when no row wants it."""
    hidden: list[bytes] = []
    """Per row, empty without HIDDEN and EXPERTS: float32 [n, hidden], or int32 [n, layers,
    per_token], 0 in layers without experts. [] when no row wants them."""
    draft_seconds: float = 0.0
    """The part of `seconds` that drafting took."""
    replies: list[ControlOpReply] = []
    """One per control op, up to the first that failed."""
    parents: list[bytes] = []
    """int32 per row: for each of its `drafts` the index of its parent draft, or -1 for the newest
    token (base/draft_tree.py). Empty for a chain; [] when no row has a tree."""
    spoilt: list[PieceFailure] = []
    """Contents of the plan's pieces that failed."""


class CopyResult(msgspec.Struct, frozen=True, omit_defaults=True, tag="copies"):
    """Copies that have ended. Reaches the engine through receive(); needs no step."""

    ids: list[int]
    failed: list[int] = []
    seconds: float = 0.0
    """Time to read `ids` from the store; 0 for other copies."""


def device_page(page: PageId) -> PageAt:
    return PageAt(DEVICE, page)


def stored_page(key: bytes) -> PageAt:
    return PageAt(STORE, key=key)


_POSITION = struct.Struct("<Q")
TRANSFER_ID_BYTES = 12


def peer_page(transfer_id: bytes, position: int) -> PageAt:
    """The page of a transfer that begins with token `position` of the sequence. In a STATE group:
    the state after `position` tokens.
    """
    return PageAt(PEER, key=transfer_id + _POSITION.pack(position))


FAKE_ROOM = 1 << 63
"""Part of the number of each room without a prefill server; requests name smaller numbers."""


def is_fake_transfer(transfer_id: bytes) -> bool:
    """Whether a transfer has no prefill server, so that its prompt is invented."""
    return len(transfer_id) == TRANSFER_ID_BYTES and bool(transfer_id[7] & 0x80)


def transfer_position(key: bytes) -> tuple[bytes, int]:
    """(transfer id, position) from the key of a peer page."""
    (position,) = _POSITION.unpack_from(key, TRANSFER_ID_BYTES)
    return key[:TRANSFER_ID_BYTES], position
