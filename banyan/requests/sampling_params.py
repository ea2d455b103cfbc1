"""`parse_sampling`: from a dictionary to checked SamplingParams, for every API.

APIs first map their field names to the names in /generate's `sampling_params`. A wrong type, an
unknown name or a missing capability is refused by name.
"""

import difflib
import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import msgspec

from banyan.base.errors import RequestError
from banyan.base.json_types import whole_number
from banyan.messages.requests import KINDS
from banyan.messages.sampling_params import GREEDY_TEMPERATURE, SamplingParams
from banyan.requests.constraint import parse_constraint
from banyan.tokenizer.stop_strings import MAX_STOPS, TextOptions, check_stops

NATIVE_DEFAULTS: Mapping[str, object] = {"max_new_tokens": 128}
"""Defaults of /generate and the offline API; the OpenAI routes have their own."""

DrawSeed = Callable[[], int]

MAX_STOP_IDS = 1024
MAX_BIASES = 1024
MAX_PARAMS_BYTES = 64 << 10
"""JSON of `custom_params`: it is read at every token."""
MAX_BIAS = 1e6

NOT_USED = "not used"
"""Why a field is ignored, if there is no better reason."""
_DECIMAL = re.compile(r"-?[0-9]{1,10}")
_INT64 = 2**63
SEED_BITS = 63

# Fields that are not available, and the value besides null that is accepted.
_UNAVAILABLE = {
    "beam_width": 1,
    "watermark": {},
}


@dataclass(frozen=True)
class FilterNumber:
    """A number of one of the filters of runner/logit_filters.py.

    Attributes:
        neutral: where it has no effect, and its default.
        low, high: its range. is_whole: it is an integer.
        switch: the field that switches its filter on; "" = this one.
    """

    neutral: float
    low: float
    high: float
    switch: str = ""
    is_whole: bool = False


FILTERS: Mapping[str, FilterNumber] = {
    "typical_p": FilterNumber(1.0, 1e-6, 1.0),
    "top_n_sigma": FilterNumber(-1.0, -1.0, 1e6),
    "xtc_probability": FilterNumber(0.0, 0.0, 1.0),
    "xtc_threshold": FilterNumber(0.1, 0.0, 1.0, "xtc_probability"),
    "dynatemp_range": FilterNumber(0.0, 0.0, 1e6),
    "dynatemp_exponent": FilterNumber(1.0, 0.0, 1e6, "dynatemp_range"),
    "dry_multiplier": FilterNumber(0.0, 0.0, 1e6),
    "dry_base": FilterNumber(1.75, 1.0, 1e6, "dry_multiplier"),
    "dry_allowed_length": FilterNumber(2, 1, 1 << 20, "dry_multiplier", is_whole=True),
    "dry_penalty_last_n": FilterNumber(-1, -1, 1 << 30, "dry_multiplier", is_whole=True),
}
"""Field -> its number. Names as llama.cpp has them."""
BREAKERS = "dry_sequence_breakers"
DEFAULT_BREAKERS = ("\n", ":", '"', "*")
MAX_BREAKERS = 64
MAX_BREAKER_CHARS = 256

_FIELDS = (
    "max_new_tokens",
    "min_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "n",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
    "logit_bias",
    "sampling_seed",
    "custom_logit_processor",
    "custom_params",
    *FILTERS,
    BREAKERS,
    *KINDS,
    *_UNAVAILABLE,
)

_TEXT_FIELDS = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")


@dataclass(frozen=True)
class Limits:
    """Limits of one request for this model and engine.

    Attributes:
        context_length: prompt + output tokens that the model can attend to.
        max_request_tokens: prompt + output tokens that the engine can hold; 0 = no own bound.
        max_n: sequences per prompt.
        max_sequences: sequences per request (prompts x n).
        max_prompt_tokens: prompt tokens of all sequences of a request together.
        max_scores: log-probabilities of the prompts of a request: positions x (1 + top + ids) of
            its sequences.
        max_output_scores: the same of its outputs, each as long as it may become.
        max_hidden: values of hidden states of a request: positions x width of its sequences; and
            as many choices of experts: positions x layers x experts.
        auto_truncate: shorten prompts and outputs that are too long instead of refusing them.
        has_tokenizer: False = token ids only, no text.
        is_embedding: prompts become vectors; no text is generated.
        hidden_size: width of a hidden state and of an input embedding.
        hidden_states: requests may have hidden states returned.
        expert_choices: per token, layers x experts; 0 = they are not returned.
        takes_embeds: prompts may be embeddings instead of tokens.
        embedding_scale: factor on rows of the embedding table.
        batch_encode: the texts of a request are tokenised several at a time.
        max_new_tokens: most tokens of an answer, whatever is asked; 0 = what fits.
        processors: logit processors that requests may name; None = none at all.
        role: "prefill" or "decode" with PD disaggregation; "" without.
        has_rooms: requests must name their bootstrap room; else each gets one.
        media_ids: placeholders of pictures, which a prompt may hold only with pictures.
        fakes_prompts: prompts of requests that name no prefill server are invented.
        is_transcriber: prompts need a sound.
        last_token: the token that a text ends with; None without a tokenizer.
    """

    context_length: int
    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    max_request_tokens: int = 0
    max_n: int = 128
    max_sequences: int = 4096
    max_prompt_tokens: int = 4_000_000
    max_scores: int = 1_000_000
    max_output_scores: int = 4_000_000
    max_hidden: int = 4_000_000
    auto_truncate: bool = False
    has_tokenizer: bool = True
    is_embedding: bool = False
    hidden_size: int = 0
    hidden_states: bool = False
    expert_choices: int = 0
    takes_embeds: bool = True
    embedding_scale: float = 1.0
    max_new_tokens: int = 0
    batch_encode: bool = False
    processors: tuple[str, ...] | None = None
    role: str = ""
    has_rooms: bool = True
    media_ids: tuple[int, ...] = ()
    fakes_prompts: bool = False
    is_transcriber: bool = False
    last_token: Callable[[str], int] | None = None

    @property
    def total(self) -> int:
        """Prompt + output tokens that fit both model and engine."""
        return min(self.context_length, self.max_request_tokens or self.context_length)


def fresh_seed() -> int:
    """An unpredictable seed."""
    return secrets.randbits(SEED_BITS)


@dataclass(frozen=True)
class ParsedSampling:
    """Checked sampling parameters, text options and constraint of one prompt."""

    sampling: SamplingParams
    text: TextOptions
    n: int = 1
    grammar: str = ""
    """Constraint of the output (`Generate.grammar`)."""
    stream_interval: int = 1
    """Tokens per streamed chunk."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Field without effect -> reason; reported in the answer."""

    def with_processor(self, name: str, params: bytes) -> "ParsedSampling":
        """The same with a logit processor of the server's own."""
        sampling = msgspec.structs.replace(self.sampling, processor=name, processor_params=params)
        return replace(self, sampling=sampling)

    def for_sequence(self, i: int) -> SamplingParams:
        """Parameters of the i-th of n sequences: the same with another seed."""
        return msgspec.structs.replace(self.sampling, seed=_wrapped(self.sampling.seed + i))


def parse_sampling(
    raw: Mapping[str, object],
    *,
    prompt_len: int,
    limits: Limits,
    defaults: Mapping[str, object] = NATIVE_DEFAULTS,
    draw_seed: DrawSeed = fresh_seed,
) -> ParsedSampling:
    """Check native sampling parameters against one prompt.

    Args:
        raw: fields by native name. null stands for the default, except that max_new_tokens null
            means "as much as fits".
        prompt_len: tokens of the prompt, already fitted (`fit_prompt`).
        defaults: values of absent fields on this route; checked like the caller's.
        draw_seed: returns the seed of a request without one.

    Raises:
        RequestError: names the field, the rule and the value; 400.
    """
    _refuse_unknown(raw)
    _refuse_unavailable(raw)
    values = _Values(raw, defaults)
    text, ignored = _text_options(values, limits)
    max_new_tokens = _max_new_tokens(values, prompt_len, limits, ignored)
    seed = _seed(values)
    ignore_eos = values.boolean("ignore_eos", False)
    own_stop_ids = _stop_ids(values, limits.vocab_size, ignored)
    n = values.integer("n", 1)
    if not 1 <= n <= limits.max_n:
        raise _violation("n", f"in [1, {limits.max_n}]", n)
    stream_interval = values.integer("stream_interval", 1)
    if stream_interval < 1:
        raise _violation("stream_interval", "at least 1", stream_interval)
    processor, processor_params = _processor(values, limits)
    if not processor and values.is_given("custom_params"):
        ignored["custom_params"] = NOT_USED
    if filters := _filters(values, limits, ignored):
        if processor:
            both = f"custom_logit_processor cannot be combined with {', '.join(filters)}"
            raise RequestError(both, param="custom_logit_processor")
        processor, processor_params = "filters", msgspec.json.encode(filters)
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=values.integer("min_new_tokens", 0),
        temperature=values.number("temperature", 1.0),
        top_p=values.number("top_p", 1.0),
        # No more tokens than there are can be chosen from, so a larger number means "all".
        top_k=min(values.integer("top_k", -1) or -1, limits.vocab_size),
        min_p=values.number("min_p", 0.0),
        frequency_penalty=values.number("frequency_penalty", 0.0),
        presence_penalty=values.number("presence_penalty", 0.0),
        repetition_penalty=values.number("repetition_penalty", 1.0),
        logit_bias=_logit_bias(values, limits.vocab_size, ignored),
        seed=draw_seed() if seed is None else seed,
        stop_ids=tuple(dict.fromkeys([*(() if ignore_eos else limits.eos_ids), *own_stop_ids])),
        ignore_eos=ignore_eos,
        processor=processor,
        processor_params=processor_params,
    )
    sampling.check(limits.vocab_size)
    grammar = parse_constraint({kind: values.get(kind) for kind in KINDS})
    return ParsedSampling(sampling, text, n, grammar, stream_interval, ignored)


def _seed(values: "_Values") -> int | None:
    """The seed; None if one is to be drawn, as for -1. Other negative ones count from 2^63 down."""
    seed = values.integer_or_none("sampling_seed")
    if seed is not None and not -_INT64 <= seed < _INT64:
        raise _violation("sampling_seed", "in [-2^63, 2^63)", seed)
    return None if seed in (None, -1) else seed % _INT64


def merged(ignored: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The reports of several prompts or sequences, each field once."""
    return {name: why for each in ignored for name, why in each.items()}


def fit_prompt(prompt: list[int], limits: Limits) -> list[int]:
    """The prompt, cut so that one output token fits, under --allow-auto-truncate.

    Raises:
        RequestError: it fills the context and may not be cut.
    """
    if len(prompt) < limits.context_length and len(prompt) < limits.total:
        return prompt
    if limits.auto_truncate:
        return prompt[: limits.total - 1]
    _check_prompt_len(len(prompt), limits)
    return prompt


def too_long(prompt_len: int, limits: Limits) -> RequestError:
    """The refusal of a prompt that cannot be cut."""
    return _overflow(
        f"The input ({prompt_len} tokens) is longer than the model's context length "
        f"({limits.total} tokens), and a prompt with pictures is not cut."
    )


def _check_prompt_len(prompt_len: int, limits: Limits) -> None:
    if prompt_len >= limits.context_length:
        raise _overflow(
            f"The input ({prompt_len} tokens) is longer than the model's context length "
            f"({limits.context_length} tokens)."
        )
    if prompt_len > limits.total:
        raise _overflow(
            f"The input ({prompt_len} tokens) is longer than the {limits.total} tokens that the "
            "KV cache can hold for one request."
        )


def _max_new_tokens(
    values: "_Values", prompt_len: int, limits: Limits, ignored: dict[str, str]
) -> int:
    """max_new_tokens: what was asked, checked against what fits; null = all that fits.

    The operator's limit cuts what was asked before it is checked, and is reported."""
    _check_prompt_len(prompt_len, limits)
    room = limits.total - prompt_len
    asked = values.integer_or_none("max_new_tokens")
    most = limits.max_new_tokens or room
    if asked is None:
        return min(room, most)
    if asked < 0:
        raise _violation("max_new_tokens", "at least 0", asked)
    if limits.max_new_tokens and asked > most:
        ignored["max_new_tokens"] = f"this server gives at most {most} tokens"
        asked = most
    if asked <= room:
        return asked
    if limits.auto_truncate:
        return room
    if prompt_len + asked > limits.context_length:
        whose = f"the model's maximum context length of {limits.context_length} tokens"
    else:
        whose = f"the {limits.total} tokens that the KV cache can hold for one request"
    raise _overflow(
        f"Requested token count exceeds {whose}. You requested a total of {prompt_len + asked} "
        f"tokens: {prompt_len} tokens from the input messages and {asked} tokens for the "
        "completion. Please reduce the number of tokens in the input messages or the completion "
        "to fit within the limit."
    )


def _overflow(text: str) -> RequestError:
    return RequestError(text, param="max_new_tokens", code="context_length_exceeded")


def _refuse_unknown(raw: Mapping[str, object]) -> None:
    for name in raw:
        if name not in _FIELDS:
            near = difflib.get_close_matches(name[:64], _FIELDS, n=1)
            hint = f"Did you mean {near[0]}?" if near else ""
            raise RequestError(
                f"sampling_params has no field {_short(name)}", param=name[:64], hint=hint
            )


def _refuse_unavailable(raw: Mapping[str, object]) -> None:
    for name, nothing in _UNAVAILABLE.items():
        value = raw.get(name)
        if value is None or (type(value) is type(nothing) and value == nothing):
            continue
        raise RequestError(
            f"{name} is not available in this build",
            param=name,
            code="not_available",
            hint=f"Leave {name} out of the request.",
        )


def _text_options(values: "_Values", limits: Limits) -> tuple[TextOptions, dict[str, str]]:
    stop, stop_regex = values.texts("stop"), values.texts("stop_regex")
    check_stops(stop, stop_regex)
    options = TextOptions(
        stop=stop,
        stop_regex=stop_regex,
        no_stop_trim=values.boolean("no_stop_trim", False),
        skip_special_tokens=values.boolean("skip_special_tokens", True),
        spaces_between_special_tokens=values.boolean("spaces_between_special_tokens", True),
    )
    if limits.has_tokenizer:
        return options, {}
    for name, given in (("stop", stop), ("stop_regex", stop_regex)):
        if given:
            raise RequestError(
                f"{name} needs a tokenizer and this server runs without one",
                param=name,
                hint="Use stop_token_ids.",
            )
    return options, {name: NOT_USED for name in _TEXT_FIELDS if values.is_given(name)}


def _processor(values: "_Values", limits: Limits) -> tuple[str, bytes]:
    """Name and JSON parameters of the logit processor; "" for none."""
    name = values.get("custom_logit_processor")
    params = values.get("custom_params")
    if params is not None and not isinstance(params, Mapping):
        raise _violation("custom_params", "an object", params)
    if name is None or name == "":
        return "", b""
    if limits.processors is None:
        raise RequestError(
            "Logit processors are switched off",
            param="custom_logit_processor",
            code="not_available",
            hint="Start the server with --enable-custom-logit-processor.",
        )
    if name not in limits.processors:
        known = ", ".join(limits.processors) or "none"
        raise RequestError(
            "custom_logit_processor must be the name of a logit processor that is installed with "
            f"the server ({known}), got {_short(name)}; code in a request is never run",
            param="custom_logit_processor",
            hint="Install a package with an entry point in the group banyan.logit_processors.",
        )
    try:
        encoded = msgspec.json.encode(params or {})
    except (OverflowError, TypeError, ValueError, RecursionError):
        raise _violation("custom_params", "a JSON object", params) from None
    if len(encoded) > MAX_PARAMS_BYTES:
        raise _violation("custom_params", f"at most {MAX_PARAMS_BYTES} bytes of JSON", params)
    return str(name), encoded


def _filters(
    values: "_Values", limits: Limits, ignored: dict[str, str]
) -> dict[str, float | list[int]]:
    """Numbers of the filters that are on. Numbers whose filter is off are reported."""
    numbers = {name: _filter_number(values, name) for name in FILTERS}
    is_on = {name: numbers[name] != rule.neutral for name, rule in FILTERS.items()}
    is_on["top_n_sigma"] = numbers["top_n_sigma"] > 0
    if is_on["dynatemp_range"] and values.number("temperature", 1.0) < GREEDY_TEMPERATURE:
        is_on["dynatemp_range"] = False
        ignored["dynatemp_range"] = "temperature is 0: the likeliest token is taken"
    found: dict[str, float | list[int]] = {}
    for name, rule in FILTERS.items():
        if rule.switch and is_on[rule.switch] or not rule.switch and is_on[name]:
            found[name] = numbers[name]
        elif rule.switch and values.is_given(name):
            ignored[name] = f"{rule.switch} is off"
    breakers = _breakers(values)
    if not is_on["dry_multiplier"]:
        if values.is_given(BREAKERS):
            ignored[BREAKERS] = "dry_multiplier is off"
    elif limits.last_token is not None:
        found["dry_breakers"] = [limits.last_token(text) for text in breakers]
    elif values.is_given(BREAKERS):
        raise RequestError(
            f"{BREAKERS} needs a tokenizer and this server runs without one", param=BREAKERS
        )
    return found


def _filter_number(values: "_Values", name: str) -> float:
    rule = FILTERS[name]
    if rule.is_whole:
        number: float = values.integer(name, int(rule.neutral))
    else:
        number = values.number(name, rule.neutral)
    if not rule.low <= number <= rule.high:
        raise _violation(name, f"in [{rule.low:g}, {rule.high:g}]", number)
    return number


def _breakers(values: "_Values") -> Sequence[str]:
    given = values.get(BREAKERS)
    if given is None:
        return DEFAULT_BREAKERS
    if not isinstance(given, list | tuple) or len(given) > MAX_BREAKERS:
        raise _violation(BREAKERS, f"a list of at most {MAX_BREAKERS} texts", given)
    for text in given:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_BREAKER_CHARS:
            raise _violation(BREAKERS, f"texts of 1 to {MAX_BREAKER_CHARS} characters", text)
    return given


def _stop_ids(values: "_Values", vocab_size: int, ignored: dict[str, str]) -> list[int]:
    """Ids outside the vocabulary are dropped and reported."""
    name, given = "stop_token_ids", values.get("stop_token_ids")
    if given is None:
        return []
    rule = f"a list of at most {MAX_STOP_IDS} token ids in [0, {vocab_size})"
    if not isinstance(given, list | tuple) or len(given) > MAX_STOP_IDS:
        raise _violation(name, rule, given)
    ids: list[int] = []
    for id in map(whole_number, given):
        if type(id) is not int or not -_INT64 <= id < _INT64:
            raise _violation(name, rule, id)
        ids.append(id)
    return _within(name, ids, vocab_size, ignored)


def _within(name: str, ids: Iterable[int], vocab_size: int, ignored: dict[str, str]) -> list[int]:
    """The ids that are in the vocabulary; the others are reported."""
    found = list(ids)
    outside = [id for id in found if not 0 <= id < vocab_size]
    if outside:
        ignored[name] = f"no token of [0, {vocab_size}) has the id {_short(outside)}"
    return [id for id in found if 0 <= id < vocab_size]


def _logit_bias(values: "_Values", vocab_size: int, ignored: dict[str, str]) -> dict[int, float]:
    """Ids outside the vocabulary are dropped and reported."""
    name, given = "logit_bias", values.get("logit_bias")
    if given is None:
        return {}
    if not isinstance(given, Mapping) or len(given) > MAX_BIASES:
        raise _violation(name, f"a map of at most {MAX_BIASES} token ids to numbers", given)
    biases: dict[int, float] = {}
    for key, bias in given.items():
        id = _token_id(key)
        if id is None:
            raise _violation(name, f"keyed by token ids in [0, {vocab_size})", key)
        if not _is_number(bias) or not abs(bias) <= MAX_BIAS:
            raise _violation(name, f"numbers in [{-MAX_BIAS:g}, {MAX_BIAS:g}]", bias)
        biases[id] = float(bias)
    return {id: biases[id] for id in _within(name, biases, vocab_size, ignored)}


def _token_id(key: object) -> int | None:
    """A token id, also as decimal text (JSON keys are text)."""
    if type(key) is int and -_INT64 <= key < _INT64:
        return key
    if isinstance(key, str) and _DECIMAL.fullmatch(key):
        return int(key)
    return None


class _Values:
    """The caller's fields over the route's defaults, read with exact types."""

    def __init__(self, raw: Mapping[str, object], defaults: Mapping[str, object]) -> None:
        self._raw = raw
        self._defaults = defaults

    def get(self, name: str) -> object:
        value = self._raw.get(name)
        if value is None and not (name == "max_new_tokens" and name in self._raw):
            return self._defaults.get(name)
        return value

    def is_given(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def integer_or_none(self, name: str) -> int | None:
        value = whole_number(self.get(name))
        if value is not None and type(value) is not int:
            raise _violation(name, "an integer", value)
        return value

    def integer(self, name: str, default: int) -> int:
        value = self.integer_or_none(name)
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if not _is_number(value):
            raise _violation(name, "a finite number", value)
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise _violation(name, "true or false", value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A text or a list of texts; none may be empty."""
        value = self.get(name)
        if value is None:
            return ()
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or len(texts) > MAX_STOPS:
            raise _violation(name, f"a text or a list of at most {MAX_STOPS} texts", value)
        for text in texts:
            if not isinstance(text, str) or not text:
                raise _violation(name, "texts of at least one character", text)
        return tuple(texts)


def _is_number(value: object) -> TypeGuard[int | float]:
    if type(value) is int:
        return abs(value) < 2**53
    return type(value) is float and math.isfinite(value)


def _violation(name: str, rule: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {rule}, got {_short(value)}.", param=name)


def _short(value: object) -> str:
    """`value` for a message, without spelling out what is large."""
    if isinstance(value, str):
        return repr(value[:80]) + ("…" if len(value) > 80 else "")
    if isinstance(value, list | tuple | Mapping) and len(value) > 8:
        return f"{len(value)} entries"
    if type(value) is int and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def _wrapped(seed: int) -> int:
    """Wrap into the signed 64-bit range, so that the last seed has a successor."""
    return (seed + _INT64) % (2 * _INT64) - _INT64
