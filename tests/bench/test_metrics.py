"""Metrics against their definitions."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.base.errors import BanyanError, ConfigError
from banyan.bench.datasets import Prompt
from banyan.bench.dialects import Answer
from banyan.bench.http import ExchangeError
from banyan.bench.report import failures, meets, percentile, read_goals, results, timing


def answer(started: float, times: list[tuple[float, int]], tokens: int | None = None) -> Answer:
    made = times[-1][1] if tokens is None else tokens
    return Answer(started, times, prompt_tokens=10, output_tokens=made, is_counted=True)


def prompts(count: int) -> list[Prompt]:
    return [Prompt("x", None, 8, 4)] * count


@given(
    st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=40),
    st.sampled_from([0, 50, 90, 99, 100]),
)
def test_percentiles_are_those_of_numpy(values: list[float], percent: int) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_times_of_one_answer() -> None:
    found = timing(answer(10.0, [(12.0, 1), (13.0, 2), (15.0, 4)]))
    assert found.ttft == 2.0
    assert found.e2e == 5.0
    assert found.tpot == pytest.approx(3.0 / 3)
    assert found.itls == [1.0, 1.0, 1.0]


def test_tokens_that_come_together_share_their_gap() -> None:
    assert timing(answer(0.0, [(1.0, 1), (4.0, 4)])).itls == [1.0, 1.0, 1.0]


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    found = timing(answer(0.0, [(1.0, 1)]))
    assert found.tpot is None
    assert found.itls == []


def test_goals_are_read_in_milliseconds() -> None:
    assert read_goals(["ttft:500", "e2el:9000.5"]) == {"ttft": 0.5, "e2e": 9.0005}


@pytest.mark.parametrize("word", ["ttft", "ttft:", "speed:3", "tpot:-1", "ttft:5ms"])
def test_goals_of_another_form_are_refused_by_name(word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        read_goals([word])


def test_a_goal_is_met_up_to_its_limit() -> None:
    found = timing(answer(0.0, [(0.5, 1), (0.6, 2)]))
    assert meets(found, {"ttft": 0.5, "tpot": 0.1 + 1e-9})
    assert not meets(found, {"ttft": 0.5, "tpot": 0.09})
    assert not meets(found, {"e2e": 0.59})


def test_goodput_counts_the_requests_that_met_every_goal() -> None:
    fast = answer(0.0, [(0.1, 1), (0.2, 2)])
    slow = answer(0.0, [(1.0, 1), (1.1, 2)])
    found = results(prompts(4), [fast, slow, fast, ExchangeError("x")], 2.0, {"ttft": 0.5})
    assert found["request_goodput"] == 1.0
    assert found["goodput_share"] == 0.5


def test_totals_rates_and_spreads() -> None:
    answers = [
        answer(0.0, [(1.0, 1), (2.0, 2), (3.0, 3)]),
        answer(1.0, [(1.5, 1), (3.5, 2)]),
    ]
    found = results(prompts(3), [*answers, ExchangeError("broken")], 4.0, {})
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 5)
    assert found["output_throughput"] == 5 / 4
    assert found["total_throughput"] == 25 / 4
    assert found["mean_ttft_ms"] == pytest.approx(750.0)
    assert found["median_itl_ms"] == pytest.approx(1000.0)
    assert found["std_ttft_ms"] == pytest.approx(statistics.pstdev([1000.0, 500.0]))
    assert found["concurrency"] == pytest.approx((3.0 + 2.5) / 4.0)
    assert found["max_concurrent_requests"] == 2
    assert found["max_output_tokens_per_s"] == 2.0
    assert "request_goodput" not in found


def test_the_intended_length_stands_in_where_the_server_counts_nothing() -> None:
    silent = Answer(0.0, [(1.0, 1)], output_tokens=1)
    found = results(prompts(1), [silent], 1.0, {})
    assert found["total_input_tokens"] == 8
    assert found["is_counted"] is False
    assert found["total_cached_tokens"] is None


def test_the_hit_rate_is_cached_tokens_over_prompt_tokens() -> None:
    hit = Answer(0.0, [(1.0, 1)], prompt_tokens=10, output_tokens=1, cached_tokens=4)
    assert results(prompts(2), [hit, hit], 1.0, {})["cache_hit_rate"] == 0.4


def test_a_run_in_which_everything_failed_still_has_every_key() -> None:
    good = results(prompts(1), [answer(0.0, [(1.0, 1)])], 1.0, {})
    bad = results(prompts(1), [ExchangeError("x")], 1.0, {})
    assert bad.keys() == good.keys()
    assert bad["output_throughput"] == 0.0


def test_errors_are_counted_by_their_text() -> None:
    outcomes: list[Answer | BanyanError] = [ExchangeError(t) for t in ("a", "b", "a")]
    assert failures([*outcomes, answer(0.0, [(1.0, 1)])]) == [("a", 2), ("b", 1)]
