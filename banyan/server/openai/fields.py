"""From an OpenAI request body to typed fields and native sampling parameters.

"Honour or report" happens here: refused fields raise, harmless and unknown ones are named in the
answer's warnings header, and `strict` makes those 400 too. Knows no engine.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import msgspec

from banyan.base.errors import RequestError
from banyan.requests import constraint
from banyan.requests.context import RequestContext
from banyan.requests.request_spec import (
    LAST_HIDDEN,
    Fields,
    PromptSpec,
    RequestSpec,
    build_specs,
)
from banyan.server.errors import Json
from banyan.server.openai.schema import HARMLESS, REFUSED, SAMPLING, CommonRequest

R = TypeVar("R", bound=CommonRequest)
T = TypeVar("T")

Report = Callable[[str, str], None]
"""Reports (field, why it is not honoured)."""
Refused = Mapping[str, tuple[Sequence[object], str]]
"""Field -> (values that ask for nothing, why every other value is a 400)."""

_AT_FIELD = re.compile(r"at `\$\.(\w+)")


def typed(raw: Mapping[str, object], kind: type[T]) -> T:
    """`raw` as a Struct; RequestError names the field of the wrong type."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _AT_FIELD.search(text) or re.search(r"required field `(\w+)`", text)
        raise RequestError(text, param=found.group(1) if found else "") from None
    except (RecursionError, OverflowError) as error:
        raise RequestError(f"the request cannot be read: {error}") from None


def read_fields(raw: Json, kind: type[R], context: RequestContext) -> R:
    """The typed request; every field of `raw` is honoured, refused or reported."""
    known = {*kind.__struct_fields__, *SAMPLING, *constraint.FIELDS}
    account_for(raw, known, REFUSED, HARMLESS, context.warn_or_refuse)
    return typed(raw, kind)


def account_for(
    raw: Json, known: Collection[str], refused: Refused, harmless: Collection[str], report: Report
) -> None:
    """Refuse or report every field of `raw` that is not `known`."""
    for name, value in raw.items():
        if name in known:
            continue
        if name in refused:
            _refuse_unless_neutral(name, value, *refused[name])
        elif value is not None:
            report(name, "not used" if name in harmless else "unknown field, ignored")


def account_for_members(
    raw: Json,
    kinds: Mapping[str, type[msgspec.Struct]],
    harmless: Collection[str],
    report: Report,
) -> None:
    """Report what the objects of a field of `raw` have, alone or in a list, and `kinds` do not."""
    found: dict[str, None] = {}
    for name, kind in kinds.items():
        value = raw.get(name)
        known = {*kind.__struct_fields__, *harmless}
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                found |= {f"{name}.{m}": None for m in one if m not in known}
    for name in found:
        report(name, "not used")


def _refuse_unless_neutral(name: str, value: object, neutral: Sequence[object], why: str) -> None:
    if not any(type(value) is type(n) and value == n for n in neutral):
        raise RequestError(why, param=name, code="not_available")


def native_sampling(raw: Json, max_new_tokens: int | None) -> Json:
    """sampling_params of /generate that mean the same; null fields take their defaults."""
    params: Json = {
        native: raw[name] for name, native in SAMPLING.items() if raw.get(name) is not None
    }
    params["max_new_tokens"] = max_new_tokens
    return {**params, **constraint.native_constraint(raw)}


def in_openai_words(error: RequestError) -> RequestError:
    """The same refusal, with the field called what the client called it."""
    words = {native: name for name, native in SAMPLING.items()} | {"max_new_tokens": "max_tokens"}
    return in_words(error, words)


def in_words(error: RequestError, words: Mapping[str, str]) -> RequestError:
    """The same refusal with other names of fields: `words` maps ours to the client's."""
    name = words.get(error.param, error.param)
    if name == error.param:
        return error
    text = error.text
    for native, own in words.items():
        text = text.replace(native, own)
    return RequestError(text, param=name, status=error.status, code=error.code, hint=error.hint)


def specs_of(
    context: RequestContext, request: msgspec.Struct, prompts: Sequence[PromptSpec], route: str
) -> list[RequestSpec]:
    """n sequences for each prompt, in answer order: all of the first prompt, then the next."""
    fields = msgspec.structs.asdict(request)
    if fields.get("rid") is None:
        fields["rid"] = context.id
    if fields.get("return_hidden_states") is True:
        fields["return_hidden_states"] = LAST_HIDDEN
    num = len(prompts) if len(prompts) > 1 else None
    specs = build_specs(context, Fields(fields, num), prompts, route)
    if len(specs) > 1 and specs[0].message.wants_experts:
        raise RequestError(
            f"return_routed_experts is of one sequence on this route, and these are {len(specs)}",
            param="return_routed_experts",
            hint="Ask for one at a time, or use /generate.",
        )
    return specs
