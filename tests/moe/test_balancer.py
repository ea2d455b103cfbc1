"""When experts move, and where to, from the choices of tokens."""

import numpy as np
import pytest

from banyan.base.errors import ConfigError
from banyan.model_config.model_config import ExpertFacts
from banyan.moe.balancer import ExpertBalancer, moves
from banyan.moe.eplb import trivial
from banyan.moe.expert_location import ExpertMap
from banyan.moe.routing_record import ExpertLayers
from tests.support.experts import SHARED, config_with

LAYERS = ExpertLayers(count=4, per_token=2, layers=4, sparse=(0, 1, 3))
MUCH_LIKED = np.array([[[0, 1], [0, 1], [0, 2], [0, 3]]] * 3)
EVEN = np.array([[[0, 1], [2, 3]]] * 3)
COPIES = ("--ep-num-redundant-experts", "2")


def balancer(*flags: str, rings: list[int] | None = None) -> tuple[ExpertBalancer, ExpertMap]:
    experts = config_with(*SHARED, *COPIES, "--enable-eplb", *flags).experts
    places = ExpertMap(trivial(4, 4, 6), 4, 0, 2, "static")
    reported = [] if rings is None else rings
    return ExpertBalancer(experts, LAYERS, places, wake=lambda: reported.append(1)), places


def run(found: ExpertBalancer, chosen: np.ndarray, passes: int) -> None:
    for _ in range(passes):
        found.ran(chosen.astype(np.int32), np.arange(chosen.shape[1]))


def test_experts_move_after_so_many_passes():
    rings: list[int] = []
    found, _ = balancer("--eplb-rebalance-num-iterations", "3", rings=rings)

    run(found, MUCH_LIKED, 2)
    assert found.due() == [] and not rings
    run(found, MUCH_LIKED, 1)
    [order] = found.due()

    assert rings and order.layers == [0, 1, 3]  # layer 2 has no experts
    for row in order.places:
        assert np.bincount(row).tolist() == [3, 1, 1, 1]
    assert found.due() == []


def test_layers_move_in_chunks_between_steps():
    found, _ = balancer(
        *("--eplb-rebalance-num-iterations", "1", "--eplb-rebalance-layers-per-chunk", "2")
    )
    run(found, MUCH_LIKED, 1)
    [first] = found.due()
    assert first.layers == [0, 1] and found.due() == []  # a step comes in between
    run(found, MUCH_LIKED, 1)
    [second] = found.due()
    assert second.layers == [3]


def test_even_loads_are_left_as_they_are():
    flags = ("--eplb-rebalance-num-iterations", "2")
    threshold = ("--eplb-min-rebalancing-utilization-threshold", "0.5")
    often, _ = balancer(*flags)
    seldom, _ = balancer(*flags, *threshold)
    for found in (often, seldom):
        run(found, np.array([[[0, 1], [0, 2], [0, 3]]] * 3), 2)
    assert often.due() and not seldom.due()


def test_places_that_are_best_already_are_not_ordered():
    found, places = balancer("--eplb-rebalance-num-iterations", "1")
    run(found, MUCH_LIKED, 1)
    [order] = found.due()
    for layer, row in zip(order.layers, order.places, strict=True):
        places.enter(layer, row)
    run(found, MUCH_LIKED, 1)
    assert found.due() == []


def test_the_algorithm_keeps_groups_together():
    """Of four ranks on two memory nodes, where experts lie in four groups."""
    from banyan.moe.rules import groups_and_nodes

    flags = (*SHARED, "--enable-eplb", "--numa-node", "0", "1")
    facts = ExpertFacts(count=8, per_token=2, inner=32, groups=4, top_groups=2)
    assert groups_and_nodes(config_with(*flags), facts) == (4, 2)
    alone = config_with(*flags, "--eplb-algorithm", "deepseek")
    assert groups_and_nodes(alone, facts) == (1, 1)
    with pytest.raises(ConfigError, match="1 groups of experts and 2 ranks cannot be shared by 2"):
        config_with(*flags, "--eplb-algorithm", "deepseek_hierarchical")


def test_an_expert_comes_from_its_own_rank_where_it_can():
    present = np.array([0, 1, 2, 3, 0, 1])
    assert list(moves(present, [0, 1, 0, 3, 2, 1], 3)) == [(0, 2), (2, 4)]


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--enable-eplb",), "no rank holds whole experts"),
        (
            (*SHARED, "--enable-eplb", "--model-impl", "transformers"),
            "--enable-eplb cannot be combined with --model-impl transformers",
        ),
        (
            (*SHARED, "--enable-eplb", "--ep-dispatch-algorithm", "fake"),
            "fake choices are balanced already",
        ),
        (
            (*SHARED, "--enable-eplb", "--eplb-algorithm", "elasticity_aware"),
            "if one of its ranks dies",
        ),
    ],
)
def test_what_experts_cannot_move_beside_is_named(flags, match):
    with pytest.raises(ConfigError, match=match):
        config_with(*flags)
