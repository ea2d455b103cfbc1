"""The step border: what the engine tells the runner (StepPlan), and what comes back (StepResult).

Ranks apply a plan in this order: orders, leaves, joins, grants, copies "before", rows, copies
"after". A plan with orders runs alone: nothing is in flight before it, nothing until it has ended.
Nothing else may pass between engine and runner. Token ids travel as int32 little-endian bytes,
log-probabilities as float32 little-endian bytes, masks as little-endian bits (bit i of the string =
token i allowed).
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
"""Row.want: report the experts that those positions chose, in the place of their states."""
DEVICE = "device"
"""PageAt.tier: the pages that rows read and write."""
STORE = "store"
"""PageAt.tier: pages that outlive the process."""
PEER = "peer"
"""PageAt.tier: pages that one server gives to another (messages/disaggregation.py)."""


class Row(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one request does in one step: run positions start … start+count−1 of its slot.

    Positions below the slot's known length take the tokens that Join or `given` brought; the
    position after the last known one takes the runner's own last sampled token. With drafts in
    flight `start` is an upper bound, used only to grant pages: the true length is the runner's.
    """

    slot: SlotId
    start: int
    count: int
    drafts: int = 0
    """How many of `count` are draft tokens to verify: the first of the runner's own, from its last
    result, whether they branch or not. An upper bound like `start`: the row is shorter where the
    runner had fewer. In a burst
    (StepPlan.steps) they are what the model itself samples, one step after another."""
    given: bytes = b""
    """int32 ids for positions start …; only when nothing of this slot is in flight."""
    want: int = 0
    score_from: int = 0
    masked: bool = False
    """Sampling waits for this row's masks (one more than it verifies drafts)."""
    hidden_from: int = 0
    propose: int = 0
    """Tokens to draft behind what the row samples, at most; told with its result. A drafter that
    keeps pages of its own writes them there: the slot has pages for so many positions more."""


class Join(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A request takes a slot. After a retraction `tokens` holds prompt + output so far."""

    slot: SlotId
    tokens: bytes
    prompt_len: int
    sampling: SamplingParams
    score_top: int = 0
    score_ids: tuple[int, ...] = ()
    adapter: int = 0
    embeds: bytes = b""
    """float32 [prompt_len, hidden] in place of the prompt's tokens; b"" when these count."""
    namespace: bytes = b""
    """Of the prefix cache: drafts are made from what requests of the same one have held."""


class PageGrant(msgspec.Struct, frozen=True, array_like=True):
    """table[slot, group][first:first+len(pages)] = pages."""

    slot: SlotId
    group: int
    first: int
    pages: list[PageId]


class PageAt(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Where one page of a group lies: DEVICE by its number, STORE by a key of its content, PEER by
    its room and its place there."""

    tier: str
    page: PageId = PADDING_PAGE
    key: bytes = b""


class PageCopy(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Copy one page of `group`. "before" is visible to this plan's rows, "after" sees their writes.

    Its end is reported by CopyResult, possibly later than the step's own result. When a copy bound
    to a row fails "before", the runner reports that row as failed too.

    A copy to or from a store or a peer is always "before" and bound to no row. To it: the page's
    bytes are taken at once, so the plan's rows may write the page, and the end comes when they
    are kept there. From it: nobody uses the page until the end is told.
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
        """It ends with its step; other copies end when their mover says so."""
        return self.src.tier == self.dst.tier == DEVICE


class Lookup(msgspec.Struct, frozen=True, array_like=True):
    """Which pages the store holds. Goes to the mover between plans, answered by one Held."""

    id: int
    keys: list[bytes]


class Held(msgspec.Struct, frozen=True, omit_defaults=True, tag="held"):
    """Answer to a Lookup: how many of its keys, from the first on, are in the store in every
    group. Reaches the engine through receive(); needs no step."""

    id: int
    count: int


class Mask(msgspec.Struct, frozen=True, array_like=True):
    """Allowed tokens of one masked row: drafts + 1 bit masks, one after another.

    b"" means no constraint: the row has become void while it waited.
    """

    step: StepId
    row: int
    bits: bytes


class Load(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one replica brings to a step that several of them work on."""

    tokens: int
    outputs: int = 0
    """Tokens that it may sample."""
    scores: int = 0
    """Most positions of known tokens that it scores."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One step's order sheet. Slots, pages and row order are the engine's decision alone."""

    step: StepId
    leaves: list[SlotId] = []
    joins: list[Join] = []
    grants: list[PageGrant] = []
    copies: list[PageCopy] = []
    rows: list[Row] = []
    masks: list[Mask] = []
    """Masks already known; those that depend on tokens in flight come from complete()."""
    peers: list[Load] = []
    """What each replica brings to this step, as they have agreed; [] when it is not joint."""
    orders: list[ControlOp] = []
    """One after another; when one cannot be carried out, those behind it are left out."""
    steps: int = 1
    """A burst: at most so many decode steps, one after another and without a word in between. Each
    row is its request's newest token and steps - 1 drafts at most. All rows end together: with the
    shortest of them, where one samples a stop id or fails, or when the engine is in a hurry."""
    tell: int = 0
    """Of a burst: the engine is told after each so many of its steps; 0 = at its end alone."""


class RowScores(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Log-probabilities of consecutive positions of one request."""

    row: int
    """Index into StepPlan.rows (-1 once the engine has passed it on)."""
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
"""RowFailure.text of a row that nothing can be chosen from for that reason."""


class RowFailure(msgspec.Struct, frozen=True, array_like=True):
    """One row failed; the others of the step are good."""

    row: int
    text: str
    status: int = 500
    """HTTP status of the request's end: 400 when what it asked for cannot be."""


class StepResult(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Outcome of one plan. A whole-step failure has `error` and nothing else."""

    step: StepId = NO_STEP
    tokens: list[bytes] = []
    """int32 ids per row: empty without SAMPLE, 1 … drafts+1 after a verify row: the drafts that
    stand, then the model's own next token."""
    drafts: list[bytes] = []
    """int32 ids per row that the runner will verify next; [] when nothing drafts."""
    scores: list[RowScores] = []
    failed: list[RowFailure] = []
    error: str = ""
    seconds: float = 0.0
    vectors: list[bytes] = []
    """float32 per row, empty without POOL; [] when no row of the step has it."""
    hidden: list[bytes] = []
    """Per row, empty without HIDDEN and EXPERTS: float32 [n, hidden], or int32 [n, layers,
    per_token], 0 in layers without experts. [] when no row of the step has them."""
    draft_seconds: float = 0.0
    """The part of `seconds` that drafting took."""
    replies: list[ControlOpReply] = []
    """Of the plan's orders, up to the first that could not be carried out."""
    parents: list[bytes] = []
    """int32 per row, for each of its `drafts` which of them it follows, one before it, or -1, the
    newest token (base/draft_tree.py); empty for a chain; [] when no row's drafts branch."""


class CopyResult(msgspec.Struct, frozen=True, omit_defaults=True, tag="copies"):
    """Copies that ended. Reaches the engine through receive(); needs no step."""

    ids: list[int]
    failed: list[int] = []
    seconds: float = 0.0
    """What reading those of `ids` from the store took; 0 for other copies."""


def device_page(page: PageId) -> PageAt:
    return PageAt(DEVICE, page)


def stored_page(key: bytes) -> PageAt:
    return PageAt(STORE, key=key)


_PLACE = struct.Struct("<Q")
ROOM_BYTES = 12
"""Of the name of a room."""


def peer_page(room: bytes, position: int) -> PageAt:
    """The page of a group that begins with this token of the sequence of a room; of a STATE group,
    what was behind so many tokens."""
    return PageAt(PEER, key=room + _PLACE.pack(position))


def place_of(key: bytes) -> tuple[bytes, int]:
    """(room, position) of a peer's page."""
    (position,) = _PLACE.unpack_from(key, ROOM_BYTES)
    return key[:ROOM_BYTES], position
