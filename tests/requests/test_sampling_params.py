"""The door refuses what is wrong by name and number, and lets through exactly what is right."""

import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.base.errors import RequestError
from banyan.config.cli import parse as config_parse
from banyan.config.env import read_environment
from banyan.config.schema import ServerConfig
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.defaults import seed_source
from banyan.requests.sampling_params import FILTERS, Limits, fit_prompt, parse_sampling

LIMITS = Limits(context_length=100, vocab_size=50, eos_ids=(1, 2))


def parse(_limits=LIMITS, _prompt_len=10, _defaults=None, _draw_seed=None, **raw):
    options = {} if _defaults is None else {"defaults": _defaults}
    options |= {} if _draw_seed is None else {"draw_seed": _draw_seed}
    return parse_sampling(raw, prompt_len=_prompt_len, limits=_limits, **options)


def refused(_limits=LIMITS, _prompt_len=10, **raw):
    with pytest.raises(RequestError) as caught:
        parse(_limits, _prompt_len, max_new_tokens=raw.pop("max_new_tokens", 5), **raw)
    assert caught.value.status == 400
    return caught.value


def test_every_field_arrives():
    parsed = parse(
        max_new_tokens=7,
        min_new_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[5, 5, 6],
        stop_regex="x+",
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        frequency_penalty=1,
        presence_penalty=-1.5,
        repetition_penalty=1.25,
        n=3,
        ignore_eos=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        no_stop_trim=True,
        stream_interval=4,
        logit_bias={"7": -2, 8: 1.5},
        sampling_seed=42,
    )
    assert parsed.sampling == SamplingParams(
        max_new_tokens=7,
        min_new_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        frequency_penalty=1.0,
        presence_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias={7: -2.0, 8: 1.5},
        seed=42,
        stop_ids=(5, 6),
        ignore_eos=True,
    )
    text = parsed.text
    assert (text.stop, text.stop_regex) == (("a", "b"), ("x+",))
    assert text.no_stop_trim and not text.skip_special_tokens
    assert not text.spaces_between_special_tokens
    assert (parsed.n, parsed.stream_interval) == (3, 4)


def test_null_means_the_default():
    nulls = parse(
        max_new_tokens=20, **{k: None for k in ("temperature", "top_k", "stop", "n", "ignore_eos")}
    )
    plain = parse(max_new_tokens=20)
    assert nulls.sampling.temperature == 1.0 and nulls.sampling.top_k == -1
    assert (nulls.text, nulls.n) == (plain.text, 1)
    assert nulls.sampling.stop_ids == (1, 2)


def test_absent_max_new_tokens_is_the_routes_default_and_null_is_all_that_fits():
    assert parse(Limits(1000, 50)).sampling.max_new_tokens == 128
    assert parse(max_new_tokens=None).sampling.max_new_tokens == 90
    assert parse(_defaults={"max_new_tokens": 16}).sampling.max_new_tokens == 16
    assert parse(_defaults={}).sampling.max_new_tokens == 90
    assert parse(Limits(100, 50, max_request_tokens=60), _defaults={}).sampling.max_new_tokens == 50


def test_the_routes_defaults_hold_where_the_caller_is_silent():
    defaults = {"max_new_tokens": 4, "temperature": 0.25, "top_p": 0.5}
    sampling = parse(_defaults=defaults, top_p=0.75).sampling
    assert (sampling.temperature, sampling.top_p) == (0.25, 0.75)


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers():
    text = "The input (100 tokens) is longer than the model's context length (100 tokens)."
    error = refused(_prompt_len=100)
    assert error.text == text and error.code == "context_length_exceeded"


def test_more_output_than_the_context_holds_is_refused_with_the_sum():
    error = refused(_prompt_len=60, max_new_tokens=41)
    assert error.code == "context_length_exceeded"
    assert "exceeds the model's maximum context length of 100 tokens" in error.text
    assert "You requested a total of 101 tokens: 60 tokens" in error.text
    assert parse(_prompt_len=60, max_new_tokens=40).sampling.max_new_tokens == 40


def test_more_than_the_cache_holds_is_refused_with_its_size():
    limits = Limits(100, 50, max_request_tokens=40)
    assert "40 tokens that the KV cache" in refused(limits, 50).text
    assert "40 tokens that the KV cache" in refused(limits, 30, max_new_tokens=11).text


def test_auto_truncation_cuts_prompt_and_output():
    limits = Limits(100, 50, auto_truncate=True)
    assert len(fit_prompt([3] * 150, limits)) == 99
    assert parse(limits, 99, max_new_tokens=50).sampling.max_new_tokens == 1


def test_without_auto_truncation_a_prompt_is_whole_or_refused():
    assert fit_prompt([3] * 99, LIMITS) == [3] * 99
    with pytest.raises(RequestError, match="100 tokens"):
        fit_prompt([3] * 100, LIMITS)


def test_a_drawn_seed_differs_and_a_given_one_counts_up():
    assert parse(max_new_tokens=1).sampling.seed != parse(max_new_tokens=1).sampling.seed
    given_seed = parse(max_new_tokens=1, sampling_seed=2**63 - 1)
    assert given_seed.for_sequence(0).seed == 2**63 - 1
    assert given_seed.for_sequence(1).seed == -(2**63)
    assert parse(max_new_tokens=1, sampling_seed=5).for_sequence(3).seed == 8
    drawn = parse(max_new_tokens=1)
    assert len({drawn.for_sequence(i).seed for i in range(8)}) == 8


def test_a_random_seed_fixes_the_seeds_that_are_drawn_in_order():
    def drawn(random_seed):
        source = seed_source(ServerConfig(random_seed=random_seed))
        return [parse(max_new_tokens=1, _draw_seed=source).sampling.seed for _ in range(3)]

    assert drawn(0) == drawn(0) != drawn(7)
    assert len(set(drawn(0))) == 3
    assert drawn(-1) != drawn(-1)


def test_only_the_seed_differs_between_sequences():
    parsed = parse(max_new_tokens=3, top_p=0.5, sampling_seed=1)
    assert parsed.for_sequence(1) == SamplingParams(
        max_new_tokens=3, top_p=0.5, seed=2, stop_ids=(1, 2)
    )


def test_end_of_sequence_ids_stop_unless_ignored():
    assert parse(max_new_tokens=1, stop_token_ids=[9]).sampling.stop_ids == (1, 2, 9)
    assert parse(max_new_tokens=1, ignore_eos=True, stop_token_ids=[9]).sampling.stop_ids == (9,)


@pytest.mark.parametrize("n", [0, -1, 2**31, 1e18, True, "5", 1.5, 129])
def test_n_is_a_small_positive_integer(n):
    assert refused(n=n).param == "n"


@pytest.mark.parametrize("value", [-1, 2**63, True, "5", 1.5, math.nan, 10**400])
def test_max_new_tokens_is_an_integer_that_fits(value):
    assert refused(max_new_tokens=value).param == "max_new_tokens"


def test_zero_new_tokens_is_legal():
    assert parse(max_new_tokens=0).sampling.max_new_tokens == 0


@pytest.mark.parametrize("bound", [5, None])
def test_min_new_tokens_may_not_exceed_the_maximum_also_when_that_is_null(bound):
    with pytest.raises(RequestError, match="min_new_tokens must be in"):
        parse(max_new_tokens=bound, min_new_tokens=91)


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "temperature": [-1, -0.01, math.nan, math.inf, 1e308, "0.5", True, [1], 10**400],
        "top_p": [0, 2, -0.1, math.nan, True, "1"],
        "top_k": [-5, 1.5, "3", True, math.inf],
        "min_p": [-0.1, 1.1, math.nan, "0"],
        "frequency_penalty": [-2.1, 2.1, math.inf, -math.inf, "1", False],
        "presence_penalty": [-2.1, 2.1, math.inf, math.nan],
        "repetition_penalty": [0, -1, 2.1, math.inf],
        "min_new_tokens": [-1, 1.5, "1", True],
        "sampling_seed": [2**64, 2**63, 2.0**63, -(2**63) - 1, "5", 1.5, True],
        "stream_interval": [0, -1, 1.5, "2", True],
        "ignore_eos": [1, 0, "true", []],
        "no_stop_trim": [1, "false"],
        "skip_special_tokens": [0, "no"],
        "spaces_between_special_tokens": [0, "no"],
        "stop": ["", [""], ["a"] * 10_000, "x" * 2**20, [1], 5, True, {"a": 1}, [["a"]]],
        "stop_regex": ["", ["a"] * 33, "x" * 257, "(a+", [3]],
        "stop_token_ids": [5, [2**63], ["5"], [True], [1.5], [1] * 2000, "5", {"5": 1}],
        "logit_bias": [
            {str(i): 1 for i in range(200_000)},
            {10**5000: 1},
            {"x": 1},
            {"1.0": 1},
            {"١": 1},
            {"5": math.nan},
            {"5": math.inf},
            {"5": 1e308},
            {"5": "1"},
            {"5": True},
            {"5": None},
            [1],
            "5",
        ],
    }.items(),
)
def test_values_outside_the_rule_are_refused_by_name(name, values):
    for value in values:
        error = refused(**{name: value})
        assert error.param == name, value
        assert name in error.text and len(error.text) < 400


@pytest.mark.parametrize("field", ["beam_width", "watermark"])
def test_what_this_build_cannot_do_is_refused_and_empty_values_ask_for_nothing(field):
    value = {"beam_width": 2, "watermark": {"k": 1}}[field]
    error = refused(**{field: value})
    assert "is not available in this build" in error.text and error.code == "not_available"
    nothing = {"beam_width": 1, "watermark": {}}[field]
    parse(max_new_tokens=1, **{field: nothing})
    parse(max_new_tokens=1, **{field: None})


def test_ids_outside_the_vocabulary_are_left_out_and_reported():
    parsed = parse(
        max_new_tokens=1,
        ignore_eos=True,
        stop_token_ids=[5, -1, 50, 2**40],
        logit_bias={"49": 1, "50": 1, -1: 2, "-7": 1},
    )
    assert parsed.sampling.stop_ids == (5,)
    assert parsed.sampling.logit_bias == {49: 1.0}
    why = "no token of [0, 50) has the id "
    assert parsed.ignored == {
        "stop_token_ids": why + "[-1, 50, 1099511627776]",
        "logit_bias": why + "[50, -1, -7]",
    }
    many = parse(max_new_tokens=1, stop_token_ids=list(range(50, 150))).ignored
    assert many == {"stop_token_ids": why + "100 entries"}


def test_no_answer_is_longer_than_the_operator_s_limit():
    given = {"SGLANG_MAX_NEW_TOKENS_LIMIT": "7"}
    server = config_parse([], read_environment(given)).server
    limits = replace(LIMITS, max_new_tokens=server.max_new_tokens)
    parsed = parse(limits, max_new_tokens=5)
    assert (parsed.sampling.max_new_tokens, parsed.ignored) == (5, {})
    for asked in (8, 10**6):
        parsed = parse(limits, max_new_tokens=asked)
        assert parsed.sampling.max_new_tokens == 7
        assert parsed.ignored == {"max_new_tokens": "this server gives at most 7 tokens"}
    parsed = parse(limits, max_new_tokens=None)
    assert (parsed.sampling.max_new_tokens, parsed.ignored) == (7, {})
    assert parse(limits, _prompt_len=97, max_new_tokens=None).sampling.max_new_tokens == 3


def test_an_unknown_field_is_refused_with_the_nearest_name():
    assert "Did you mean temperature?" in str(refused(temprature=1))
    assert refused(**{"x" * 10_000: 1}).param == "x" * 64


def test_without_a_tokenizer_stops_are_refused_and_text_options_reported():
    limits = Limits(100, 50, has_tokenizer=False)
    assert "Use stop_token_ids" in str(refused(limits, stop="a"))
    assert "stop_regex needs a tokenizer" in refused(limits, stop_regex="a").text
    parsed = parse(limits, max_new_tokens=1, skip_special_tokens=False)
    assert list(parsed.ignored) == ["skip_special_tokens"]


def test_a_logit_processor_is_named_with_its_parameters():
    limits = replace(LIMITS, processors=("banner",))
    params = {"custom_params": {"a": [1]}, "max_new_tokens": 1}
    sampling = parse(limits, custom_logit_processor="banner", **params).sampling
    assert (sampling.processor, sampling.processor_params) == ("banner", b'{"a":[1]}')
    assert list(parse(limits, **params).ignored) == ["custom_params"]
    assert "--enable-custom-logit-processor" in str(refused(custom_logit_processor="banner"))
    for code in ('{"callable": "80049500"}', "gASV", "os:system", 7, ["banner"], {"a": 1}):
        error = refused(limits, custom_logit_processor=code)
        assert "(banner)" in error.text and "banyan.logit_processors" in str(error)
    for wrong in ("x", [1], {"a": {1, 2, object}}, {"a": "x" * 70_000}):
        error = refused(limits, custom_logit_processor="banner", custom_params=wrong)
        assert error.param == "custom_params"


def test_filters_become_one_processor_of_the_server():
    limits = replace(LIMITS, last_token=lambda text: len(text))
    assert parse(limits, max_new_tokens=1, typical_p=1, top_n_sigma=-1).sampling.processor == ""
    parsed = parse(limits, max_new_tokens=1, xtc_probability=0.5, dry_multiplier=0.8, dry_base=2)
    assert parsed.sampling.processor == "filters" and not parsed.ignored
    assert msgspec.json.decode(parsed.sampling.processor_params) == {
        "xtc_probability": 0.5,
        "xtc_threshold": 0.1,
        "dry_multiplier": 0.8,
        "dry_base": 2.0,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "dry_breakers": [1, 1, 1, 1],
    }
    greedy = parse(limits, max_new_tokens=1, temperature=0, dynatemp_range=0.5)
    assert greedy.sampling.processor == "" and list(greedy.ignored) == ["dynatemp_range"]
    parsed = parse(limits, max_new_tokens=1, xtc_threshold=0.2, dry_sequence_breakers=["x"])
    assert list(parsed.ignored) == ["xtc_threshold", "dry_sequence_breakers"]


def test_filters_out_of_range_or_with_a_processor_of_the_caller_are_refused():
    limits = replace(LIMITS, processors=("banner",))
    for name in FILTERS:
        for wrong in (-(2**63), 2**64, math.inf, "x", [1]):
            assert refused(limits, **{name: wrong}).param == name
    for wrong in ("x", [""], [1], ["x"] * 65, ["x" * 257]):
        assert refused(limits, dry_sequence_breakers=wrong).param == "dry_sequence_breakers"
    both = refused(limits, custom_logit_processor="banner", typical_p=0.9)
    assert both.param == "custom_logit_processor" and "typical_p" in both.text


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3)
)
FIELDS = st.sampled_from(
    ["max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature"]
    + ["top_p", "top_k", "min_p", "frequency_penalty", "repetition_penalty", "n", "ignore_eos"]
    + ["logit_bias", "sampling_seed", "stream_interval", "beam_width", "custom_params"]
    + [*FILTERS, "dry_sequence_breakers"]
)
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=3), SCALARS)
)


@given(st.dictionaries(FIELDS, VALUES, max_size=4))
def test_anything_at_all_is_either_legal_or_refused_with_400(raw):
    try:
        parsed = parse_sampling(raw, prompt_len=10, limits=LIMITS)
    except RequestError as error:
        assert error.status == 400 and error.text
    else:
        parsed.sampling.check(LIMITS.vocab_size)
        assert 1 <= parsed.n <= LIMITS.max_n
        assert 0 <= parsed.sampling.max_new_tokens <= 90
