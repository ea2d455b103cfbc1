"""From an OpenAI request body to typed fields, sampling parameters and request specs.

Every field is honoured, refused or reported: refused fields raise, harmless and unknown ones are
named in the answer's warnings header, or refused under --strict-requests.
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
"""Field -> (values that are accepted because they change nothing, reason to refuse others)."""

_AT_FIELD = re.compile(r"at `\$\.(\w+)")


def typed(raw: Mapping[str, object], kind: type[T]) -> T:
    """`raw` as a Struct of type `kind`; RequestError names the field of the wrong type."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _AT_FIELD.search(text) or re.search(r"required field `(\w+)`", text)
        raise RequestError(text, param=found.group(1) if found else "") from None
    except (RecursionError, OverflowError) as error:
        raise RequestError(f"the request cannot be read: {error}") from None


def read_fields(raw: Json, kind: type[R], context: RequestContext) -> R:
    """The typed request. Every field of `raw` is honoured, refused or reported."""
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
    """Report unknown members of objects in these fields of `raw`, alone or in a list."""
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
    """The equivalent sampling_params of /generate; null fields take their defaults."""
    params: Json = {
        native: raw[name] for name, native in SAMPLING.items() if raw.get(name) is not None
    }
    params["max_new_tokens"] = max_new_tokens
    return {**params, **constraint.native_constraint(raw)}


def with_openai_names(error: RequestError) -> RequestError:
    """The same refusal with the names of OpenAI's fields."""
    names = {native: name for name, native in SAMPLING.items()} | {"max_new_tokens": "max_tokens"}
    return with_names(error, names)


def with_names(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same refusal with other names of fields: `names` maps ours to the client's."""
    name = names.get(error.param, error.param)
    if name == error.param:
        return error
    text = error.text
    for native, own in names.items():
        text = text.replace(native, own)
    return RequestError(text, param=name, status=error.status, code=error.code, hint=error.hint)


def specs_of(
    context: RequestContext, request: msgspec.Struct, prompts: Sequence[PromptSpec], route: str
) -> list[RequestSpec]:
    """One spec for each sequence in answer order: all of the first prompt, then the next.

    True for return_hidden_states means the last hidden state on these routes. The id of the
    exchange is used if the body has no rid.
    """
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
