"""Properties of where experts are put, for any loads."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.moe.eplb import (
    balanced,
    copied,
    kept_in_place,
    packed,
    trivial,
    unevenness,
)


@st.composite
def cases(draw):
    """Loads [layers, experts], places, ranks, groups, nodes."""
    nodes, of_node = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks = nodes * of_node
    groups = nodes * draw(st.integers(1, 2))
    experts = groups * draw(st.integers(1, 3)) * of_node
    extra = ranks * draw(st.integers(0, 3))
    numbers = st.integers(0, 1000)
    rows = st.lists(numbers, min_size=experts, max_size=experts)
    loads = draw(st.lists(rows, min_size=1, max_size=3))
    return np.array(loads), experts + extra, ranks, groups, nodes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_every_expert_has_a_place_and_the_same_loads_give_the_same_places(case):
    loads, places, ranks, groups, nodes = case

    found = balanced(loads, places, ranks, groups, nodes)

    assert found.shape == (len(loads), places)
    assert all(set(row) == set(range(loads.shape[1])) for row in found.tolist())
    assert np.array_equal(found, balanced(loads.copy(), places, ranks, groups, nodes))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_a_group_lies_on_one_node(case):
    loads, places, ranks, groups, nodes = case
    size = loads.shape[1] // groups

    found = balanced(loads, places, ranks, groups, nodes)

    for row in found.reshape(len(loads), nodes, -1):
        homes = [{int(expert) // size for expert in node} for node in row]
        assert sum(map(len, homes)) == groups == len(set().union(*homes))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=24), st.integers(1, 6))
def test_packs_have_equal_numbers_and_no_pack_is_much_heavier(numbers, packs):
    loads = np.array(numbers * packs, np.float64)

    found = packed(loads, packs)

    assert sorted(at for pack in found for at in pack) == list(range(len(loads)))
    assert {len(pack) for pack in found} == {len(loads) // packs}
    sums = [loads[pack].sum() for pack in found]
    assert max(sums) - min(sums) <= loads.max()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=16), st.integers(0, 16))
def test_copies_lower_the_largest_load_as_far_as_copies_can(numbers, extra):
    loads = np.array(numbers, np.float64)

    copies = np.bincount(copied(loads, len(loads) + extra))

    assert copies.sum() == len(loads) + extra and copies.min() >= 1
    # No copy of another expert would have helped more: each was the busiest when it was copied.
    each = loads / copies
    for expert in np.flatnonzero(copies > 1):
        assert loads[expert] / (copies[expert] - 1) >= each.max()


def test_the_much_liked_expert_is_copied_and_spread():
    loads = np.array([[10, 10, 10, 90]])

    found = balanced(loads, 6, 2)

    assert np.bincount(found[0]).tolist() == [1, 1, 1, 3]
    assert unevenness(loads, found, 2) == pytest.approx(70 / 60)
    assert unevenness(loads, trivial(1, 4, 6), 2) > unevenness(loads, found, 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases(), st.randoms(use_true_random=False))
def test_what_stays_on_its_rank_stays_where_it_is(case, random):
    loads, places, ranks, groups, nodes = case
    wanted = balanced(loads, places, ranks, groups, nodes)[0]
    before = wanted.tolist()
    random.shuffle(before)
    present = np.array(before)

    found = kept_in_place(wanted, present, ranks)

    for now, was, asked in zip(
        *(part.reshape(ranks, -1).tolist() for part in (found, present, wanted)), strict=True
    ):
        assert sorted(now) == sorted(asked)
        stays = sum(min(was.count(e), asked.count(e)) for e in set(was))
        assert sum(a == b for a, b in zip(now, was, strict=True)) == stays
