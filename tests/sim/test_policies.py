"""What the policies promise, on the shipped scheduler in virtual time."""

from pathlib import Path

import pytest

from banyan.engine.core_spec import CoreSpec
from banyan.kv_cache.sizing import FULL, CacheGroup
from banyan.scheduler.budget import Priorities, SchedulerLimits
from banyan.scheduler.routing import round_robin
from banyan.sim.device import OneDevice, Roofline, World
from banyan.sim.replica import ReplicaSet, SimulatedReplica, spread
from banyan.sim.workload import Arrival, mooncake, poisson
from tests.support.simulated import DEVICE, MODEL_CONFIG, TRACE, Outcome


def play(arrivals, *, order="fcfs", pages=4000, running=16, conservativeness=1.0, **more):
    limits = SchedulerLimits(
        max_running=running,
        chunk_tokens=2048,
        max_request_tokens=150_000,
        conservativeness=conservativeness,
        **more,
    )
    core = CoreSpec(groups=(CacheGroup(FULL, 16, pages),), limits=limits, order=order).build()
    world = World()
    replica = SimulatedReplica(world, core, OneDevice(world, Roofline(MODEL_CONFIG, DEVICE)))
    fleet = ReplicaSet(world, [replica], round_robin)
    fleet.play(arrivals)
    world.run()
    core.check()
    return Outcome(fleet.report(), replica.visits, replica.plan_hashes)


def turns(families=12, count=240, seed=5):
    """Many families of prompts, mixed, all there at once; the cache holds a few families."""
    return [
        Arrival(0.0, a.prompt, a.output_len)
        for a in poisson(1.0, count, 560, 6, shared_len=480, families=families, seed=seed)
    ]


@pytest.mark.parametrize("order", ["lpm", "dfs-weight"])
def test_policies_that_look_at_the_cache_raise_hits_where_it_is_small(order):
    few = {"pages": 200, "running": 4}
    arrivals = turns(count=120)
    blind = play(arrivals, **few).report
    aware = play(arrivals, order=order, **few).report
    assert aware.finished == blind.finished == 120
    assert aware.hit_rate > blind.hit_rate + 0.1
    assert aware.seconds < blind.seconds


@pytest.mark.full
@pytest.mark.skipif(not Path(TRACE).exists(), reason="the Mooncake trace is not here")
def test_longest_prefix_first_raises_hits_on_the_mooncake_trace():
    arrivals = list(mooncake(str(TRACE), limit=200, speed=8.0))
    small = {"pages": 8_000, "running": 8}
    blind = play(arrivals, **small).report
    aware = play(arrivals, order="lpm", **small).report
    assert aware.finished == blind.finished == 200
    assert aware.hit_rate > blind.hit_rate


def test_longest_output_first_starts_the_long_answers_early():
    arrivals = [Arrival(0.0, a.prompt, 4 if i % 4 else 120) for i, a in enumerate(turns(12, 80))]
    plain = play(arrivals, running=8).report
    sorted_ = play(arrivals, running=8, order="lof").report
    assert sorted_.seconds < plain.seconds
    assert sorted_.ttft.mean > plain.ttft.mean  # what it costs


def test_random_order_serves_everybody_and_replays_the_same():
    first, second = (play(turns(), order="random") for _ in range(2))
    assert first.report.finished == 240
    assert first.plan_hashes == second.plan_hashes


def test_priorities_bound_the_wait_of_the_few_that_have_one():
    arrivals = turns(count=160)
    chosen = {i for i in range(160) if i % 20 == 19}
    marked = [
        Arrival(a.at_s, a.prompt, a.output_len, priority=20 if i in chosen else 0)
        for i, a in enumerate(arrivals)
    ]

    def waits(replica):
        visits = list(replica.visits)
        return spread([visits[i].token_s[0] for i in sorted(chosen)])

    off = waits(play(marked, running=4))
    on = waits(play(marked, running=4, priorities=Priorities(are_honoured=True)))
    assert on.p99 < 0.25 * off.p99


def test_conservativeness_trades_retractions_for_running_requests():
    arrivals = list(poisson(1000.0, 100, 64, 150, seed=1))
    bold, careful = (
        play(arrivals, pages=300, running=64, conservativeness=c).report for c in (0.1, 3.0)
    )
    assert bold.finished == careful.finished == 100
    assert bold.retractions > 10 > careful.retractions
    assert bold.steps < careful.steps  # more run at once
