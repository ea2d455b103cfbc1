"""Prefill and decode servers in virtual time: the shipped scheduler hands over, on paper."""

from dataclasses import replace

import pytest

from banyan.base.errors import ConfigError
from banyan.sim.layout import ParallelLayout, read_layout
from banyan.sim.study import study
from tests.sim.test_layouts import SLOW_LINK, question


def test_pools_answer_all_and_share_the_work() -> None:
    asked = question(rate=10.0)
    pools, alone = (study(asked, read_layout(text)) for text in ("prefill=1,decode=1", "dp=2"))
    assert pools.layout.devices == alone.layout.devices == 2
    found, right = pools.report, alone.report
    assert (found.finished, found.failed) == (right.finished, 0) == (40, 0)
    assert found.output_tokens == right.output_tokens
    assert found.itl.p99 < right.itl.p99, "no prompt is computed beside those that are answered"
    assert found.ttft.p50 > 0


def test_pools_are_played_alike_twice() -> None:
    asked = question(rate=10.0)
    first, second = (study(asked, ParallelLayout(prefill=2, decode=1)).report for _ in range(2))
    assert first == second


def test_more_prefill_servers_answer_prompts_sooner() -> None:
    asked = question(rate=200.0, count=60)
    one, three = (study(asked, ParallelLayout(prefill=n, decode=1)).report for n in (1, 3))
    assert three.ttft.p50 < one.ttft.p50


def test_each_server_of_a_pool_gets_its_share() -> None:
    asked = replace(question(), arrivals=[replace(a, at_s=0.0) for a in question().arrivals])
    one, two = (study(asked, ParallelLayout(prefill=n, decode=n)).report for n in (1, 2))
    assert two.ttft.p99 < 0.6 * one.ttft.p99, "half of the prompts wait for each"


def test_what_travels_takes_its_time() -> None:
    quick = question(rate=10.0)
    slow = replace(quick, peer_bytes_per_s=1e5)
    layout = ParallelLayout(prefill=1, decode=1)
    assert study(slow, layout).report.ttft.p50 > 2 * study(quick, layout).report.ttft.p50
    assert study(question(SLOW_LINK), layout).report.finished == 40


def test_prefixes_that_are_cached_are_not_sent_again() -> None:
    asked, layout = question(rate=2.0, peer_bytes_per_s=3e7), ParallelLayout(prefill=1, decode=1)
    prompt = asked.arrivals[0].prompt
    same = replace(asked, arrivals=[replace(one, prompt=prompt) for one in asked.arrivals])
    found = study(same, layout).report
    assert found.ttft.p50 < study(asked, layout).report.ttft.p50 / 10
    assert found.hit_rate > 0.5, "that of the prefill server"


@pytest.mark.parametrize(
    "text", ["prefill=1", "decode=2", "prefill=1,decode=1,dp=2", "prefill=0,decode=1"]
)
def test_pools_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_layout(text)
    assert str(read_layout("tp=2,prefill=2,decode=3")) == "tp=2,prefill=2,decode=3"
    assert read_layout("tp=2,prefill=2,decode=3").devices == 10
