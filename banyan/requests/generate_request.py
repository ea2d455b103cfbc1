"""The request form of /generate and the offline API: a dictionary in, RequestSpecs out.

Every field is honoured, refused by name, or named in the answer under `not_honoured`.
generate_response builds the answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from banyan.base.errors import RequestError
from banyan.media.parts import AUDIO, IMAGE, NOUNS, MediaPart, read_options, source_of
from banyan.media.preparation import Expanded, MediaService, PreparedItem, expanded
from banyan.requests import constraint
from banyan.requests.lora_names import AdapterNames
from banyan.requests.prompts import (
    FLOAT_BYTES,
    PLACEHOLDER,
    as_contents,
    encode_texts,
    parse_embeds,
)
from banyan.requests.request_spec import (
    SHARED_FIELDS,
    Fields,
    PromptSpec,
    RequestContext,
    RequestSpec,
    ScoreOptions,
    build_specs,
    checked_boolean,
    checked_integer,
    checked_type,
)
from banyan.requests.sampling_params import (
    NATIVE_DEFAULTS,
    NOT_USED,
    DrawSeed,
    Limits,
    fit_prompt,
    fresh_seed,
    parse_sampling,
    too_long,
)
from banyan.tokenizer.tokenizer import Tokenizer

MAX_TOP = 256
"""Best alternatives per position."""

MAX_SCORE_IDS = 1024
"""Token ids scored at every position."""

_HONOURED = frozenset(
    {
        "text",
        "input_ids",
        "input_embeds",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "return_text_in_logprobs",
        "stream",
        "return_prompt_token_ids",
        "custom_logit_processor",
        "image_data",
        "audio_data",
        *SHARED_FIELDS,
        "lora_path",
    }
)

_REFUSED = frozenset(
    {
        "video_data",
        "watermark",
        "return_sampling_mask",
        "sampling_logprobs_mode",
        "return_flat_raw_top_logprobs",
        "return_flat_raw_output_top_logprobs",
        "return_flat_raw_top_logprobs_b64",
        "return_indexer_topk",
        "session_params",
        "lora_id",
        "positional_embed_overrides",
        "require_reasoning",
        "max_thinking_tokens",
        "return_bytes",
        "return_entropy",
        "multi_item_delimiter_indices",
        *constraint.FIELDS,
        "token_indices_to_pool",
    }
)
"""Fields that would change the answer. Other unknown fields are named in `not_honoured`."""

_HARMLESS_DEFAULTS: Mapping[str, object] = {"log_metrics": True}
"""Fields whose default is not empty; the default is accepted."""


@dataclass(frozen=True)
class NativeSequence:
    """One sequence of a request, and how its answer is shown."""

    request: RequestSpec
    show_scores: bool = False
    show_top: bool = False
    show_picked: bool = False
    show_score_text: bool = False
    show_prompt_ids: bool = False
    not_honoured: Mapping[str, str] = field(default_factory=dict)
    """Field without effect -> reason."""


@dataclass(frozen=True)
class NativeRequest:
    """The sequences of one body in answer order: prompts, each n times."""

    sequences: list[NativeSequence]
    is_list: bool
    """The answer is a list (several prompts, or n > 1)."""
    stream: bool


_MEDIA: Mapping[str, str] = {"image_data": IMAGE, "audio_data": AUDIO}
"""Field -> kind of its files."""


def parse_native(
    body: Mapping[str, object],
    *,
    tokenizer: Tokenizer | None,
    limits: Limits,
    defaults: Mapping[str, object] = NATIVE_DEFAULTS,
    draw_seed: DrawSeed = fresh_seed,
    context: RequestContext | None = None,
    adapters: AdapterNames | None = None,
    media: MediaService | None = None,
) -> NativeRequest:
    """Check a native request and tokenise its prompts.

    Args:
        context: of the caller; None = a caller without a key.
        adapters: adapters that may be named; None = none.
        media: prepares pictures; None = the model takes none.

    Raises:
        NeedsMedia: its pictures are not in `context.media` yet.
        RequestError: names the field, the rule and the value.
    """
    context = context or RequestContext()
    ignored = _check_fields(body)
    fields = Fields(body)
    embeds, is_batch = _embedded(fields, limits)
    if embeds:
        width = limits.hidden_size * FLOAT_BYTES
        given = [(e, *as_contents(e, limits.hidden_size)) for e in embeds]
        whole = [Expanded([PLACEHOLDER] * (len(e) // width), s, c) for e, s, c in given]
        fields.num = len(whole) if is_batch else None
    else:
        prompts = _prompts(fields, tokenizer, limits)
        fields.num = len(prompts) if _is_batch(fields) else None
        whole = _with_media(fields, prompts, limits, media, context)
    prompts = [prompt.ids for prompt in whole]
    sampling = _sampling(fields)
    parsed = [
        parse_sampling(
            raw, prompt_len=len(p), limits=limits, defaults=defaults, draw_seed=draw_seed
        )
        for raw, p in zip(sampling, prompts, strict=True)
    ]
    total = sum(p.n for p in parsed)
    if total > limits.max_sequences:
        raise RequestError(
            f"prompts x n must be in [1, {limits.max_sequences}], got {total}.", param="n"
        )
    is_list = fields.num is not None or total > 1
    shown = _scores(fields, prompts)
    chosen = _adapters(fields, len(prompts), adapters or AdapterNames())
    show_text = fields.flag("return_text_in_logprobs")
    show_prompt_ids = fields.flag("return_prompt_token_ids")
    specs = build_specs(
        context,
        fields,
        [
            PromptSpec(prompt.ids, options, scores.options, adapter, prompt.spans, prompt.contents)
            for prompt, options, scores, adapter in zip(whole, parsed, shown, chosen, strict=True)
        ],
        "generate",
    )
    owners = [i for i, options in enumerate(parsed) for _ in range(options.n)]
    sequences = [
        NativeSequence(
            request=spec,
            show_scores=shown[i].is_wanted,
            show_top=shown[i].options.top > 0,
            show_picked=bool(shown[i].options.ids),
            show_score_text=show_text,
            show_prompt_ids=show_prompt_ids,
            not_honoured={**dict.fromkeys(ignored, NOT_USED), **parsed[i].ignored},
        )
        for spec, i in zip(specs, owners, strict=True)
    ]
    return NativeRequest(sequences, is_list, fields.flag("stream"))


@dataclass(frozen=True)
class _Shown:
    is_wanted: bool
    options: ScoreOptions


def _check_fields(body: Mapping[str, object]) -> list[str]:
    """Refuse unavailable fields that would change the answer; return those without effect."""
    ignored = []
    for name, value in body.items():
        if name in _HONOURED or _is_neutral(value) or _HARMLESS_DEFAULTS.get(name) is value:
            continue
        if name in _REFUSED:
            raise RequestError(
                f"{name} is not available in this build",
                param=name,
                code="not_available",
                hint=f"Leave {name} out of the request.",
            )
        ignored.append(name[:64])
    return ignored


def _is_neutral(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_neutral(v) for v in value)
    return value is None or value is False or value == "" or value == {}


def _is_batch(fields: Fields) -> bool:
    text, ids = fields.get("text"), fields.get("input_ids")
    return isinstance(text, list) or (isinstance(ids, list) and isinstance(ids[0], list))


def _adapters(fields: Fields, count: int, names: AdapterNames) -> list[str]:
    """The LoRA adapter of each prompt."""
    if _is_neutral(fields.get("lora_path")):
        return [""] * count
    return fields.each("lora_path", names.named)


def _sampling(fields: Fields) -> list[dict[str, object]]:
    """Sampling parameters of each prompt, with the logit processor of the body."""
    params = fields.each("sampling_params", _dictionary)
    processors = fields.each("custom_logit_processor", lambda value, _: value)
    return [
        {**(own or {}), **({} if name is None else {"custom_logit_processor": name})}
        for own, name in zip(params, processors, strict=True)
    ]


def _embedded(fields: Fields, limits: Limits) -> tuple[list[bytes], bool]:
    """Prompts given as embeddings, and whether they are a batch; [] without any."""
    given = fields.get("input_embeds")
    if given is None:
        return [], False
    for name in ("text", "input_ids", *_MEDIA, "return_prompt_token_ids"):
        if fields.get(name):
            raise RequestError(
                f"input_embeds stand in place of token ids; leave out {name}", param=name
            )
    return parse_embeds(given, limits)


def _with_media(
    fields: Fields,
    prompts: list[list[int]],
    limits: Limits,
    media: MediaService | None,
    context: RequestContext,
) -> list[Expanded]:
    """The prompts with the pictures and sounds of the request in place of their placeholders."""
    given = [name for name in _MEDIA if not _is_neutral(fields.get(name))]
    if not given:
        return [Expanded(prompt) for prompt in prompts]
    parts: list[list[MediaPart | PreparedItem]] = [[] for _ in prompts]
    for name in given:
        kind = _MEDIA[name]
        if media is None or kind not in media.takes:
            raise RequestError(
                f"this model takes no {NOUNS[kind]}",
                param=name,
                code="not_available",
                hint=f"Leave {name} out of the request.",
            )
        for own, listed in zip(parts, _by_prompt(fields, name, len(prompts)), strict=True):
            media.check_count(len(listed), kind)
            for value in listed:
                param = f"{name}[{len(own)}]"
                own.append(_given(value, param, name, media, context.tenant))
    assert media is not None
    wanted = [part for listed in parts for part in listed if isinstance(part, MediaPart)]
    rest = iter(context.media.of(wanted))
    found = []
    for prompt, listed in zip(prompts, parts, strict=True):
        own = [next(rest) if isinstance(part, MediaPart) else part for part in listed]
        if any(not isinstance(part, MediaPart) for part in listed):
            from banyan.media.given import folded  # numpy is imported if a request needs it

            prompt = folded(prompt, own)
        whole = expanded(prompt, own, media.placeholders, media.placeholder_texts)
        if len(whole.ids) >= min(limits.context_length, limits.total):
            raise too_long(len(whole.ids), limits)
        found.append(whole)
    return found


def _by_prompt(fields: Fields, name: str, num_prompts: int) -> list[list[object]]:
    """The files of each prompt: one, a list of them, or for several prompts a list of either."""
    value = fields.get(name)
    if fields.num is None:
        listed = value if isinstance(value, list) else [value]
        inner = listed[0] if len(listed) == 1 else None
        return [inner if isinstance(inner, list) else listed]
    values = value if isinstance(value, list) else [value] * num_prompts
    each = fields.in_batch(name, values)
    return [v if isinstance(v, list) else [] if v is None else [v] for v in each]


def _given(
    value: object, param: str, name: str, media: MediaService, tenant: bytes
) -> MediaPart | PreparedItem:
    """A file (`_part`), or what the client gives in place of a picture (`given_item`)."""
    if isinstance(value, Mapping) and value.get("format") is not None and _MEDIA[name] == IMAGE:
        from banyan.media.given import given_item

        return given_item(value, param, media.model, tenant)
    return _part(value, param, name)


def _part(value: object, param: str, name: str) -> MediaPart:
    """A URL, base64, a path as file: URL, bytes (offline), or an object with one of these as its
    "url" or its kind."""
    kind = _MEDIA[name]
    if isinstance(value, Mapping):
        if value.get("format") is not None:
            raise RequestError(
                f"{param}: features of another processor (format) are not taken",
                param=name,
                code="not_available",
                hint="Send the file itself",
            )
        options = read_options(value, param) if kind == IMAGE else {}
        inner = value.get("url", value.get(kind))
        return replace(_part(inner, param, name), options=options)
    if isinstance(value, bytes):
        return MediaPart(kind, value, param)
    if not isinstance(value, str) or not value:
        raise RequestError(
            f"{param} must be a URL, base64 or an object with a url, got {type(value).__name__}",
            param=name,
        )
    return MediaPart(kind, source_of(value, param), param)


def _prompts(fields: Fields, tokenizer: Tokenizer | None, limits: Limits) -> list[list[int]]:
    text, ids = fields.get("text"), fields.get("input_ids")
    if (text is None) == (ids is None):
        raise RequestError(
            "Exactly one of text, input_ids and input_embeds must be given.", param="text"
        )
    name, given = ("text", text) if ids is None else ("input_ids", ids)
    if given in ("", []):
        raise RequestError(
            f"{name} must be a prompt or a list of prompts, got {given!r}.", param=name
        )
    if ids is None:
        texts = given if isinstance(given, list) else [given]
        _check_num(len(texts), name, limits)
        prompts = encode_texts(*_checked_texts(texts, tokenizer), limits)
    else:
        if not isinstance(ids, list):
            raise RequestError(
                f"input_ids must be a list of token ids, got {type(ids).__name__}.", param=name
            )
        prompts = ids if isinstance(ids[0], list) else [ids]
        _check_num(len(prompts), name, limits)
        for prompt in prompts:
            _check_ids(prompt, limits.vocab_size)
    return [fit_prompt(p, limits) for p in prompts]


def _check_num(num: int, name: str, limits: Limits) -> None:
    if num > limits.max_sequences:
        raise RequestError(
            f"{name} must be at most {limits.max_sequences} prompts, got {num}.", param=name
        )


def _checked_texts(texts: list[object], tokenizer: Tokenizer | None) -> tuple[Tokenizer, list[str]]:
    """The tokenizer and the texts; RequestError if there is none or one is empty."""
    for text in texts:
        if not isinstance(text, str) or not text:
            got = type(text).__name__ if not isinstance(text, str) else "''"
            raise RequestError(
                f"text must be a text of at least one character, got {got}.", param="text"
            )
    if tokenizer is None:
        raise RequestError(
            "text needs a tokenizer and this server runs without one",
            param="text",
            hint="Send input_ids.",
        )
    return tokenizer, cast(list[str], texts)


def _check_ids(prompt: object, vocab_size: int) -> None:
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("input_ids must be lists of at least one token id.", param="input_ids")
    wrong = next((t for t in prompt if type(t) is not int or not 0 <= t < vocab_size), None)
    if wrong is not None or None in prompt:
        raise RequestError(
            f"input_ids must be integers in [0, {vocab_size}), got {str(wrong)[:40]}.",
            param="input_ids",
        )


def _scores(fields: Fields, prompts: list[list[int]]) -> list[_Shown]:
    wanted = fields.each("return_logprob", checked_boolean)
    starts = fields.each("logprob_start_len", checked_integer)
    tops = fields.each("top_logprobs_num", checked_integer)
    picked = _score_ids(fields)
    shown = []
    for prompt, is_wanted, start, top, ids in zip(
        prompts, wanted, starts, tops, picked, strict=True
    ):
        if start is not None and not -1 <= start <= len(prompt):
            raise RequestError(
                f"logprob_start_len must be in [-1, {len(prompt)}], got {start}.",
                param="logprob_start_len",
            )
        if top is not None and not 0 <= top <= MAX_TOP:
            raise RequestError(
                f"top_logprobs_num must be in [0, {MAX_TOP}], got {top}.", param="top_logprobs_num"
            )
        if not is_wanted:
            shown.append(_Shown(False, ScoreOptions()))
            continue
        first = len(prompt) if start is None or start < 0 else start
        shown.append(_Shown(True, ScoreOptions(first, top or 0, ids)))
    return shown


def _score_ids(fields: Fields) -> list[tuple[int, ...]]:
    value = fields.get("token_ids_logprob")
    if (
        fields.num is not None
        and isinstance(value, list)
        and any(isinstance(v, list) for v in value)
    ):
        return [_id_tuple(v) for v in fields.in_batch("token_ids_logprob", value)]
    return [_id_tuple(value)] * (fields.num or 1)


def _id_tuple(value: object) -> tuple[int, ...]:
    name = "token_ids_logprob"
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_SCORE_IDS:
        raise RequestError(
            f"{name} must be a flat list of at most {MAX_SCORE_IDS} token ids.", param=name
        )
    for id in value:
        if type(id) is not int:
            raise RequestError(
                f"{name} must be a flat list of token ids, got {type(id).__name__} in it.",
                param=name,
            )
    return tuple(value)


def _dictionary(value: object, name: str) -> dict[str, object] | None:
    return checked_type(value, name, dict, "an object")
