"""Sessions: turns of /generate that continue earlier ones without sending them again.

A session keeps the tokens of its finished turns by request id, so that a turn may continue any of
them. Their keys and values stay in the prefix cache as long as it has capacity.
"""

import uuid
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import RequestError
from banyan.base.fair_share import FairShare
from banyan.base.log import logger
from banyan.base.thread_pool import THREAD_BYTES, off_loop
from banyan.requests.prompts import encode_texts
from banyan.requests.request_spec import checked_rid
from banyan.requests.sampling_params import Limits
from banyan.tokenizer.tokenizer import Tokenizer

MAX_SESSIONS = 4096
MAX_TURNS = 1024
MAX_IDLE_S = 3600.0
"""Default time without a turn after which a session is dropped."""
MAX_BYTES = 256 << 20
"""Tokens of all turns of all sessions."""
_KEYS = ("id", "rid", "offset", "replace", "drop_previous_output")

log = logger(__name__)

Body = dict[str, object]


@dataclass(frozen=True)
class _Turn:
    """A finished turn: its whole prompt and its output, as int32."""

    prompt: "array[int]"
    output: "array[int]"

    @property
    def num_bytes(self) -> int:
        return (len(self.prompt) + len(self.output)) * self.prompt.itemsize


@dataclass
class _Session:
    capacity: int
    """Most tokens of one history; a token has at least one character."""
    timeout_s: float
    used_s: float
    turns: dict[str, _Turn] = field(default_factory=dict)
    is_streaming: bool = False
    """Each turn goes on from the latest one, which alone is kept."""
    is_busy: bool = False
    """A turn of a streaming session runs."""

    @property
    def num_bytes(self) -> int:
        return sum(turn.num_bytes for turn in self.turns.values())


@dataclass(frozen=True)
class Begun:
    """A turn in progress. `body` is the request with its whole history."""

    body: Body
    _sessions: "Sessions"
    _session: _Session
    _rid: str

    def keep(self, output: list[int]) -> None:
        """Store the turn with its output, after it ended in order."""
        prompt = self.body["input_ids"]
        assert isinstance(prompt, list)
        turn = _Turn(array("i", prompt), array("i", output))
        if self._session.is_streaming:
            self._session.turns.clear()
        self._session.turns[self._rid] = turn
        self._sessions.reserve(turn.num_bytes)

    def end(self) -> None:
        """The turn is over, however it ended; a streaming session may have the next one."""
        self._session.is_busy = False


class Sessions:
    """The open sessions of one server. A tenant sees only its own.

    Args:
        max_bytes: bound on all tokens. Beyond it the tenant with most bytes loses its least
            recently used session.
    """

    def __init__(self, clock: Clock | None = None, max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock or WallClock()
        self._max_bytes = max_bytes
        self._num_bytes = 0
        """Upper bound of the bytes kept; counted again when it exceeds the limit."""
        self._open: dict[tuple[bytes, str], _Session] = {}

    def open(
        self,
        capacity: int,
        session_id: str | None = None,
        timeout_s: float | None = None,
        tenant: bytes = b"",
        is_streaming: bool = False,
    ) -> str:
        """Open a session; returns its id.

        Args:
            timeout_s: seconds without a turn after which it is dropped; None = MAX_IDLE_S.
            is_streaming: each turn goes on from the latest one.

        Raises:
            RequestError: the id is open, a value is not legal, or too many sessions are open.
        """
        self._drop_old()
        if capacity < 1:
            raise RequestError(
                f"capacity_of_str_len must be at least 1, got {capacity}.",
                param="capacity_of_str_len",
            )
        if timeout_s is not None and not 0 < timeout_s < 1e9:
            raise RequestError("timeout must be seconds above 0.", param="timeout")
        name = uuid.uuid4().hex if session_id is None else checked_rid(session_id)
        if (tenant, name) in self._open:
            raise RequestError(f"Session {name} is open already.", param="session_id")
        if len(self._open) >= MAX_SESSIONS:
            self._drop_one_for(tenant)
        idle_s = MAX_IDLE_S if timeout_s is None else timeout_s
        now = self._clock.now()
        self._open[tenant, name] = _Session(capacity, idle_s, now, is_streaming=is_streaming)
        return name

    def close(self, session_id: str, tenant: bytes = b"") -> bool:
        """Drop a session; False if there is none of this name."""
        return self._open.pop((tenant, session_id), None) is not None

    async def begin(
        self,
        body: Mapping[str, object],
        tokenizer: Tokenizer | None,
        limits: Limits,
        tenant: bytes = b"",
    ) -> Begun | None:
        """Start the turn of a body; None if it names no session. `Begun.end` must follow.

        Raises:
            RequestError: no such session or turn, or the history is too long.
        """
        params = body.get("session_params")
        if not params:
            return None
        self._drop_old()
        if not isinstance(params, dict) or set(params) - set(_KEYS):
            raise RequestError(
                f"session_params must be an object with {', '.join(_KEYS)}.", param="session_params"
            )
        session = self._open.get((tenant, str(params.get("id"))))
        if session is None:
            raise RequestError(
                f"Session {str(params.get('id'))[:80]!r} is not open.", param="session_params"
            )
        session.used_s = self._clock.now()
        if not session.is_streaming:
            return await self._begin(session, body, params, tokenizer, limits)
        if set(params) != {"id"}:
            raise RequestError(
                "A streaming session goes on from its latest turn; session_params has only id.",
                param="session_params",
            )
        if session.is_busy:
            raise RequestError("The session's latest turn has not ended.", param="session_params")
        session.is_busy = True
        try:
            latest = {"rid": next(reversed(session.turns), None)}
            return await self._begin(session, body, latest, tokenizer, limits)
        except BaseException:
            session.is_busy = False
            raise

    async def _begin(
        self,
        session: _Session,
        body: Mapping[str, object],
        params: Mapping[str, object],
        tokenizer: Tokenizer | None,
        limits: Limits,
    ) -> Begun:
        history = _history(session, params)
        given = body.get("text") or body.get("input_ids")
        size = len(given) if isinstance(given, str | list) else 0
        is_first = not history
        if tokenizer is not None and tokenizer.waits:
            size += THREAD_BYTES + 1
        new = await off_loop(size, lambda: _new_ids(body, tokenizer, limits, is_first))
        prompt = history + new
        if len(prompt) > session.capacity:
            raise RequestError(
                f"The session's history has {len(prompt)} tokens, it was opened for "
                f"{session.capacity}.",
                param="session_params",
            )
        rid = uuid.uuid4().hex if body.get("rid") is None else checked_rid(body["rid"])
        if rid in session.turns or len(session.turns) >= MAX_TURNS:
            raise RequestError(
                f"The session has a turn {rid}, or {MAX_TURNS} of them.", param="rid"
            )
        rest = {k: v for k, v in body.items() if k not in ("session_params", "text", "rid")}
        return Begun({**rest, "input_ids": prompt, "rid": rid}, self, session, rid)

    def reserve(self, num_new: int) -> None:
        """Count new bytes. Past the limit, drop sessions until an eighth of it is free."""
        self._num_bytes += num_new
        if self._num_bytes <= self._max_bytes:
            return
        sizes = {key: session.num_bytes for key, session in self._open.items()}
        is_full = sum(sizes.values()) > self._max_bytes
        while is_full and sum(sizes.values()) > self._max_bytes * 7 // 8:
            tenants: dict[bytes, int] = {}
            for (tenant, _), size in sizes.items():
                tenants[tenant] = tenants.get(tenant, 0) + size
            heaviest = max(tenants, key=tenants.__getitem__)
            mine = [key for key in sizes if key[0] == heaviest and sizes[key]]
            oldest = min(mine, key=lambda key: self._open[key].used_s)
            del self._open[oldest], sizes[oldest]
            log.warning("session forgotten: more than %d bytes are kept", self._max_bytes)
        self._num_bytes = sum(sizes.values())

    def _drop_one_for(self, tenant: bytes) -> None:
        """Drop the least recently used session of the tenant that has most sessions.

        Raises:
            RequestError: 503; that is `tenant` itself.
        """
        share = FairShare(MAX_SESSIONS)
        for owner, _ in self._open:
            share.take(owner)
        heaviest = share.heaviest(tenant, 1)
        if heaviest == tenant:
            raise RequestError(
                f"{share.held_by(tenant)} of {MAX_SESSIONS} sessions are yours; close some.",
                status=503,
                code="too_many",
            )
        mine = [key for key in self._open if key[0] == heaviest]
        del self._open[min(mine, key=lambda key: self._open[key].used_s)]
        log.warning("session forgotten: its caller has %d of %d", len(mine), MAX_SESSIONS)

    def _drop_old(self) -> None:
        now = self._clock.now()
        for key, session in list(self._open.items()):
            if now - session.used_s > session.timeout_s:
                del self._open[key]


def _history(session: _Session, params: Mapping[str, object]) -> list[int]:
    """The tokens that a turn continues. `replace` drops the turns after that point."""
    rid, offset = params.get("rid"), params.get("offset")
    if offset is not None and (type(offset) is not int or offset < -1):
        raise RequestError("offset must be -1 or more tokens.", param="session_params")
    if rid in (None, ""):
        if params.get("replace"):
            session.turns.clear()
        return []
    turn = session.turns.get(str(rid))
    if turn is None:
        raise RequestError(
            f"The session has no finished turn {str(rid)[:80]!r}.", param="session_params"
        )
    if params.get("replace"):
        names = list(session.turns)
        for later in names[names.index(str(rid)) + 1 :]:
            del session.turns[later]
    found = turn.prompt.tolist()
    if not params.get("drop_previous_output"):
        found += turn.output.tolist()
    return found[:offset] if offset is not None and offset > 0 else found


def _new_ids(
    body: Mapping[str, object], tokenizer: Tokenizer | None, limits: Limits, is_first: bool
) -> list[int]:
    """Tokens that a turn adds; only the first has the special tokens of a beginning."""
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise RequestError("Exactly one of text and input_ids must be given.", param="text")
    if isinstance(text, str) and tokenizer is not None:
        (found,) = encode_texts(tokenizer, [text], limits, add_special_tokens=is_first)
        return found
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise RequestError("A turn of a session has one prompt.", param="session_params")
    return ids
