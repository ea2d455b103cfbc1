"""The simulator runs the shipped scheduler in virtual time, and gives the same answer twice."""

import json

import pytest

from banyan.base.errors import ConfigError
from banyan.engine.core_spec import CoreSpec
from banyan.kv_cache.sizing import FULL, CacheGroup
from banyan.messages.plan import Row, StepPlan
from banyan.scheduler.budget import SchedulerLimits
from banyan.scheduler.routing import round_robin
from banyan.sim.device import OneDevice, Roofline, World
from banyan.sim.replica import ReplicaSet, SimulatedReplica, spread
from banyan.sim.workload import mooncake, poisson
from tests.support.simulated import DEVICE, MODEL_CONFIG, TRACE, Outcome


def simulate(arrivals, *, depth=1, pages=4000, host_s=0.0, concurrency=0, order="fcfs"):
    limits = SchedulerLimits(
        depth=depth, max_running=16, chunk_tokens=512, max_request_tokens=32_768
    )
    groups = (CacheGroup(FULL, 16, pages),)
    core = CoreSpec(groups=groups, limits=limits, order=order).build()
    world = World()
    replica = SimulatedReplica(
        world, core, OneDevice(world, Roofline(MODEL_CONFIG, DEVICE)), host_s
    )
    fleet = ReplicaSet(world, [replica], round_robin)
    if concurrency:
        fleet.play_at_concurrency(arrivals, concurrency)
    else:
        fleet.play(arrivals)
    world.run()
    core.check()
    assert core.is_idle
    return Outcome(fleet.report(), replica.visits, replica.plan_hashes)


def families(count=60, rate=20.0):
    return list(poisson(rate, count, 300, 20, shared_len=200, families=4, seed=3))


def test_a_simulation_gives_the_same_plans_twice():
    first, second = simulate(families(), depth=2), simulate(families(), depth=2)
    assert len(first.plan_hashes) > 100
    assert first.plan_hashes == second.plan_hashes
    assert first.report == second.report


def test_every_request_gets_its_output_length():
    arrivals = families()
    report = simulate(arrivals).report
    assert report.finished == 60 and report.failed == 0
    assert report.output_tokens == sum(arrival.output_len for arrival in arrivals)


def test_shared_prompts_hit_the_cache_and_private_ones_do_not():
    shared = simulate(families()).report
    private = simulate(poisson(20.0, 60, 300, 20, seed=3)).report
    assert shared.hit_rate > 0.4
    assert private.hit_rate == 0.0


def test_depth_two_hides_the_time_of_the_host():
    slow = simulate(families(), depth=1, host_s=0.02, concurrency=8).report
    fast = simulate(families(), depth=2, host_s=0.02, concurrency=8).report
    assert fast.seconds < 0.8 * slow.seconds
    assert fast.output_tokens == slow.output_tokens


def test_a_fixed_concurrency_is_never_exceeded():
    replica = simulate(families(), concurrency=4)
    marks = [(v.submitted_s, 1) for v in replica.visits]
    marks += [(v.end_s, -1) for v in replica.visits]
    alive = peak = 0
    for _, change in sorted(marks):
        alive += change
        peak = max(peak, alive)
    assert peak == 4


def test_a_small_cache_retracts_and_still_answers_all():
    report = simulate(poisson(1000.0, 40, 64, 300, seed=1), pages=120).report
    assert report.finished == 40 and report.retractions > 0


def test_equal_hash_ids_of_a_trace_become_equal_tokens(tmp_path):
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]},
        {"timestamp": 2000, "input_length": 900, "output_length": 4, "hash_ids": [0, 7]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    first, second = mooncake(str(path), speed=2.0)
    assert (len(first.prompt), second.at_s, second.output_len) == (4400, 1.0, 4)
    assert first.prompt[:2048] == second.prompt[:2048]
    assert first.prompt[2048:2112] != second.prompt[2048:2112]


def test_a_line_that_is_no_trace_entry_is_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0}\n')
    with pytest.raises(ConfigError, match="line 1"):
        list(mooncake(str(path)))


@pytest.mark.skipif(not TRACE.exists(), reason="the Mooncake trace is not in ../shared/data")
def test_a_recorded_conversation_trace_shares_prefixes():
    report = simulate(mooncake(str(TRACE), limit=15, speed=0.01), pages=20_000).report
    assert report.finished >= 14 and report.hit_rate > 0.0


def test_a_step_takes_as_long_as_its_slower_half():
    roofline = Roofline(MODEL_CONFIG, DEVICE)
    decode = roofline.seconds(StepPlan(step=1, rows=[Row(slot=1, start=100, count=1)]))
    batch = [Row(slot=i, start=100, count=1) for i in range(1, 5)]
    prefill = roofline.seconds(StepPlan(step=1, rows=[Row(slot=1, start=0, count=512)]))
    assert roofline.seconds(StepPlan(step=1, rows=batch)) < 1.1 * decode
    assert prefill > 10 * decode


def test_percentiles_are_values_that_occurred():
    found = spread([3.0, 1.0, 2.0, 10.0])
    assert (found.mean, found.p50, found.p90, found.p99) == (4.0, 3.0, 10.0, 10.0)
