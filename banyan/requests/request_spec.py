"""RequestSpec: one sequence to generate, and `build_specs`, which makes it for every API.

An API parses its own fields, encodes the prompts, and reads the sampling parameters and the
constraint of each (`parse_sampling`). `build_specs` is the last step: it adds the fields that all
APIs spell alike. The message in a spec goes to the engine as it is. A RequestContext has what
depends on the caller, whatever the transport.
"""

import hashlib
import re
import time
import uuid
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from banyan.base.errors import RequestError
from banyan.base.ids import RequestId, fresh_id
from banyan.base.json_types import whole_number
from banyan.media.preparation import PreparedMedia
from banyan.messages.requests import ANY_REPLICA, NO_HIDDEN, NO_SCORES, Generate
from banyan.messages.sampling_params import SamplingParams
from banyan.messages.spans import Content, Span, ids_with_spans
from banyan.requests import bootstrap
from banyan.requests.sampling_params import ParsedSampling
from banyan.tokenizer.stop_strings import TextOptions


@dataclass
class RequestContext:
    """One request of one caller. A listener creates it; it holds nothing of HTTP.

    Attributes:
        id: used in logs and answers.
        headers: by lower-case name (`headers.get`).
        is_strict: fields without effect are refused (--strict-requests).
        tenant: digest of the caller's key. It owns what the request creates, and is part of the
            prefix-cache namespace.
        key_name: name of the caller's key in --api-key-file; "" = none.
        is_admin: may end the requests of others.
        deadline_s: monotonic time at which the request must have ended; None = no limit.
        media: the pictures of the request, once they are prepared.
        warnings: reports for the answer about parts of the request without effect.
    """

    id: str = field(default_factory=fresh_id)
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    is_strict: bool = False
    tenant: bytes = b""
    key_name: str = ""
    is_admin: bool = False
    deadline_s: float | None = None
    media: PreparedMedia = field(default_factory=PreparedMedia)
    warnings: list[str] = field(default_factory=list[str])

    def warn(self, text: str) -> None:
        """Report in the answer a part of the request that has no effect."""
        self.warnings.append(text)

    def warn_or_refuse(self, name: str, why: str, is_strict: bool = False) -> None:
        """Report the field `name`, which has no effect.

        Args:
            is_strict: refuse it on any server.

        Raises:
            RequestError: 400, under --strict-requests or with `is_strict`.
        """
        if is_strict or self.is_strict:
            raise RequestError(
                f"{name[:80]!r} is not honoured by this server",
                param=name[:80],
                code="field_not_honoured",
                hint="Leave it out, or start without --strict-requests",
            )
        self.warn(f"{name[:80]}: {why}")

    def time_left_s(self) -> float | None:
        """Seconds until the deadline; None = no limit."""
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()


T = TypeVar("T")

ALL_HIDDEN = "all"
"""RequestSpec.hidden: hidden states of every position that went through the model."""
LAST_HIDDEN = "last"
"""RequestSpec.hidden: the hidden state of the last such position."""

SHARED_FIELDS = (
    "rid",
    "priority",
    "extra_key",
    "cache_salt",
    "return_hidden_states",
    "return_routed_experts",
    "routed_experts_start_len",
    *bootstrap.FIELDS,
)
"""Fields that `build_specs` reads."""

_RID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_SALT = re.compile(r"[\w.:=+-]{1,128}", re.ASCII)


@dataclass(frozen=True)
class ScoreOptions:
    """Which log-probabilities are wanted.

    Attributes:
        start: first position; NO_SCORES = none, the length of the prompt = the output only.
        top: best alternatives at each position.
        ids: tokens that are scored at each position.
    """

    start: int = NO_SCORES
    top: int = 0
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class RequestSpec:
    """One sequence to generate (n > 1 is n of these).

    Attributes:
        message: sent to the engine.
        prompt: the tokens of `message`, with placeholders in spans.
        text: how tokens become text, and which text ends the request.
        hidden: which hidden states are wanted: ALL_HIDDEN, LAST_HIDDEN, or "" for none.
        route: API that created the request, for logs and metrics: "chat", "generate", "probe".
        key_name: name of the caller's key, for logs and metrics.
    """

    message: Generate
    prompt: list[int]
    text: TextOptions = field(default_factory=TextOptions)
    hidden: str = ""
    route: str = ""
    key_name: str = ""

    @property
    def id(self) -> RequestId:
        return self.message.request

    @property
    def sampling(self) -> SamplingParams:
        return self.message.sampling

    def with_message(self, **changes: Any) -> "RequestSpec":
        """The same request with other values of these fields of the message."""
        return replace(self, message=msgspec.structs.replace(self.message, **changes))


@dataclass
class TracedCall:
    """A request of any listener, for its trace span.

    Attributes:
        began_s: monotonic time of its arrival.
        name, attributes: of the span.
        status: attribute with the status that the caller gets, {} = none yet. The argument is the
            error that ended the request.
        trace: value of `traceresponse`, set by the span; "" = not traced.
    """

    context: RequestContext
    began_s: float
    name: str
    attributes: Mapping[str, str]
    status: Callable[[RequestError | None], Mapping[str, int]]
    trace: str = ""


@dataclass(frozen=True)
class PromptSpec:
    """One prompt and its own part of a request.

    Attributes:
        tokens: ids; placeholders in spans.
        sampling: parsed sampling parameters, text options and constraint.
        adapter: LoRA adapter that answers; "" = the model by itself.
        spans, contents: stretches that are given by content (messages/spans.py).
        pool: the pooled vector of the prompt is wanted, and no text.
        count: sequences; None = the n of `sampling`.
    """

    tokens: list[int]
    sampling: ParsedSampling
    scores: ScoreOptions = field(default_factory=ScoreOptions)
    adapter: str = ""
    spans: tuple[Span, ...] = ()
    contents: tuple[Content, ...] = ()
    pool: bool = False
    count: int | None = None

    @property
    def num_sequences(self) -> int:
        return self.sampling.n if self.count is None else self.count


class Fields:
    """The fields of a body. Those that may differ by prompt are spread over `num` prompts.

    Args:
        num: prompts in the batch; None for a single prompt.
    """

    def __init__(self, body: Mapping[str, object], num: int | None = None) -> None:
        self._body = body
        self.num = num

    def get(self, name: str) -> object:
        return self._body.get(name)

    def flag(self, name: str) -> bool:
        return checked_boolean(self.get(name), name) or False

    def each(self, name: str, check: Callable[[object, str], T]) -> list[T]:
        """One checked value per prompt: the same for all, or from a list of that length."""
        value = self.get(name)
        if self.num is None:
            return [check(value, name)]
        if not isinstance(value, list):
            return [check(value, name)] * self.num
        return [check(v, name) for v in self.in_batch(name, value)]

    def in_batch(self, name: str, values: list[object]) -> list[object]:
        if len(values) != self.num:
            raise RequestError(
                f"{name} must be one value or {self.num} of them, got {len(values)}.", param=name
            )
        return values

    def rooms(self, header: str, num_prompts: int) -> list[bootstrap.BootstrapRoom]:
        """The bootstrap room of each prompt, and the replica of the header X-Data-Parallel-Rank."""
        body = self._body
        if not header and all(body.get(name) is None for name in bootstrap.FIELDS):
            return [bootstrap.NO_ROOM] * num_prompts
        if header:
            body = bootstrap.with_replica(body, header)
        has_list = isinstance(body.get("bootstrap_room"), list)
        return bootstrap.bootstrap_rooms(body.get, num_prompts if has_list else self.num)


def build_specs(
    context: RequestContext, fields: Fields, prompts: Sequence[PromptSpec], route: str
) -> list[RequestSpec]:
    """One spec for each sequence in answer order: all of the first prompt, then the next.

    Args:
        fields: SHARED_FIELDS of the body; everything else is in `prompts`.

    Raises:
        RequestError: names the field, the rule and the value.
    """
    ids = _ids(fields, [prompt.num_sequences for prompt in prompts])
    rooms = fields.rooms(context.headers.get(bootstrap.HEADER, ""), len(prompts))
    salts, keys = fields.each("cache_salt", checked_salt), fields.each("extra_key", checked_salt)
    hidden = fields.each("return_hidden_states", hidden_wanted)
    experts_from = first_experts(fields.get)
    priority = checked_integer(fields.get("priority"), "priority") or 0
    specs: list[RequestSpec] = []
    for i, prompt in enumerate(prompts):
        parsed, room = prompt.sampling, rooms[i]
        namespace = namespace_of(context.tenant, salts[i], keys[i])
        specs += [
            spec_of(
                next(ids),
                prompt.tokens,
                parsed.for_sequence(j),
                parsed.text,
                prompt.scores,
                hidden[i],
                experts_from,
                route,
                namespace=namespace,
                adapter=prompt.adapter,
                priority=priority,
                grammar=parsed.grammar,
                pool=prompt.pool,
                caller=context.tenant,
                spans=prompt.spans,
                contents=prompt.contents,
                transfer_id=b"" if room.number is None else room.name(j),
                prefill_address=room.prefill_address,
                replica=ANY_REPLICA if room.replica is None else room.replica,
                prefill_replica=(
                    ANY_REPLICA if room.prefill_replica is None else room.prefill_replica
                ),
                stream_interval=parsed.stream_interval,
                key_name=context.key_name,
            )
            for j in range(prompt.num_sequences)
        ]
    return specs


def spec_of(
    id: RequestId,
    prompt: list[int],
    sampling: SamplingParams,
    text: TextOptions | None = None,
    scores: ScoreOptions | None = None,
    hidden: str = "",
    experts_from: int = NO_HIDDEN,
    route: str = "",
    key_name: str = "",
    **fields: Any,
) -> RequestSpec:
    """A spec from checked values.

    Args:
        experts_from: first position whose chosen experts are wanted; NO_HIDDEN = none.
        fields: the other fields of Generate.

    Raises:
        RequestError: a token id does not fit 32 bits.
    """
    scores = scores or ScoreOptions()
    try:
        tokens = array("i", prompt).tobytes()
    except OverflowError:
        raise RequestError("input_ids must be 32-bit integers.", param="input_ids") from None
    if fields.get("spans"):
        tokens = ids_with_spans(tokens, fields["spans"])
    first_hidden = experts_from
    if hidden:
        first_hidden = 0 if hidden == ALL_HIDDEN else len(prompt) - 1
    message = Generate(
        request=id,
        tokens=tokens,
        sampling=sampling,
        score_from=scores.start,
        score_top=scores.top if scores.start != NO_SCORES else 0,
        score_ids=scores.ids if scores.start != NO_SCORES else (),
        hidden_from=first_hidden,
        wants_experts=experts_from != NO_HIDDEN,
        **fields,
    )
    return RequestSpec(message, prompt, text or TextOptions(), hidden, route, key_name)


def _ids(fields: Fields, counts: list[int]) -> Iterator[RequestId]:
    """Request ids in sequence order: new ones, or the caller's, numbered if there are several."""
    given = fields.get("rid")
    if given is None:
        return (RequestId(uuid.uuid4().hex) for _ in range(sum(counts)))
    if isinstance(given, list) and fields.num is not None:
        stems = [checked_rid(r) for r in fields.in_batch("rid", given)]
        return (
            RequestId(stem if n == 1 else f"{stem}_{j}")
            for stem, n in zip(stems, counts, strict=True)
            for j in range(n)
        )
    stem, total = checked_rid(given), sum(counts)
    if fields.num is None and total == 1:
        return iter([RequestId(stem)])
    return (RequestId(f"{stem}_{i}") for i in range(total))


def checked_rid(rid: object) -> str:
    """A client's name for its request; RequestError unless short and plain."""
    if not isinstance(rid, str) or not _RID.fullmatch(rid):
        raise RequestError(
            "rid must be 1 to 128 letters, digits, '_', '.', ':' or '-'", param="rid"
        )
    return rid


def namespace_of(tenant: bytes, cache_salt: str | None, extra_key: str | None) -> bytes:
    """Prefix-cache namespace of a caller, narrowed by the fields of the body.

    Requests without any of the three share the empty namespace.
    """
    if not (tenant or cache_salt or extra_key):
        return b""
    parts = (tenant.hex(), cache_salt or "", extra_key or "")
    return hashlib.sha256("\0".join(parts).encode()).digest()[:16]


def checked_salt(value: object, name: str) -> str | None:
    """A salt of the legal alphabet; null is none."""
    if value is not None and (not isinstance(value, str) or not _SALT.fullmatch(value)):
        raise RequestError(f"{name} must be 1 to 128 letters, digits or _ . : = + -", param=name)
    return value


def hidden_wanted(value: object, name: str) -> str:
    """Which hidden states `return_hidden_states` asks for; "" for none."""
    if value in (None, False):
        return ""
    if value is not True and value != LAST_HIDDEN:
        raise RequestError(f'{name} must be true, false or "last".', param=name)
    return ALL_HIDDEN if value is True else LAST_HIDDEN


def first_experts(get: Callable[[str], object]) -> int:
    """First position whose chosen experts are wanted; NO_HIDDEN for none."""
    start_name, name = "routed_experts_start_len", "return_routed_experts"
    start = checked_integer(get(start_name), start_name) or 0
    if start < 0:
        raise RequestError(f"{start_name} must be at least 0, got {start}.", param=start_name)
    return start if checked_boolean(get(name), name) else NO_HIDDEN


def checked_boolean(value: object, name: str) -> bool | None:
    return checked_type(value, name, bool, "true or false")


def checked_integer(value: object, name: str) -> int | None:
    value = whole_number(value)
    if type(value) is int and not -(2**31) <= value < 2**31:
        raise RequestError(f"{name} must be a 32-bit integer, got {str(value)[:40]}.", param=name)
    return checked_type(value, name, int, "an integer")


def checked_type(value: object, name: str, kind: type[T], rule: str) -> T | None:
    """`value` of exactly this type; null is None."""
    if value is None:
        return None
    if not isinstance(value, kind) or type(value) is not kind:
        raise RequestError(f"{name} must be {rule}, got {type(value).__name__}.", param=name)
    return value
