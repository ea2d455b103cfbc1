"""Where experts lie, from flags, JSON and files."""

import json

import numpy as np
import pytest
import torch

from banyan.base.errors import ConfigError
from banyan.config.schema import ExpertsConfig
from banyan.formats.arrays import write_arrays
from banyan.moe.expert_location import ExpertMap, open_expert_map, read_location
from banyan.parallel.groups import Group, Groups
from tests.support.experts import EXPERTS, config_with

MAP = [[0, 1, 2, 3, 3, 0], [1, 0, 3, 2, 1, 2]]


class Nobody:
    """Collectives that nothing is exchanged by."""


def placed(*flags: str, rank: int = 1) -> ExpertMap | None:
    config = config_with("--tp", "2", "--ep", "2", *flags)
    mine = Group(rank, 2, Nobody())  # type: ignore[arg-type]
    return open_expert_map(config, EXPERTS, Groups.with_experts_apart(mine), torch.device("cpu"))


def location(value: object) -> tuple[str, ...]:
    text = value if isinstance(value, str) else json.dumps(value)
    return ("--ep-num-redundant-experts", "2", "--init-expert-location", text)


def test_without_flags_experts_lie_in_their_order_as_ever():
    assert placed() is None


def test_copies_are_of_the_first_experts():
    found = placed("--ep-num-redundant-experts", "2")
    assert found is not None
    assert found.logical.tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    assert (found.mine(0), found.first, found.home) == ([3, 0, 1], 3, 2)
    assert found.tables[0].copies.tolist() == [2, 2, 1, 1]
    assert found.tables[0].slots.tolist() == [[0, 4, 0], [1, 5, 0], [2, 0, 0], [3, 0, 0]]


def test_the_algorithm_is_the_one_given():
    algorithms = [placed("--ep-dispatch-algorithm", name) for name in ("static", "dynamic", "fake")]
    assert [(a.dispatch, a.is_fake) for a in algorithms if a is not None] == [
        ("static", False),
        ("dynamic", False),
        ("dynamic", True),
    ]


def test_a_location_is_read_from_json_and_files(tmp_path):
    in_json, arrays = tmp_path / "map.json", tmp_path / "map.safetensors"
    in_json.write_text(json.dumps({"physical_to_logical_map": MAP}))
    write_arrays(str(arrays), {"physical_to_logical_map": np.array(MAP)}, {})
    for given in ({"physical_to_logical_map": MAP}, str(in_json), str(arrays)):
        found = placed(*location(given))
        assert found is not None and found.logical.tolist() == MAP


def test_counts_of_the_recorder_are_balanced(tmp_path):
    counts = np.array([[90, 10, 10, 10], [10, 10, 10, 90]])
    write_arrays(str(tmp_path / "dump.safetensors"), {"logical_count": counts}, {})
    found = placed(*location(str(tmp_path / "dump.safetensors")))
    assert found is not None
    assert [np.bincount(row).tolist() for row in found.logical] == [[3, 1, 1, 1], [1, 1, 1, 3]]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"physical_to_logical_map": MAP[:1]},
            r"is \[1, 6\], the model has 2 layers, and 6 places",
        ),
        ({"physical_to_logical_map": [[0, 1, 2, 0, 1, 2]] * 2}, "layer 0 .* each of 4 experts"),
        ({"logical_count": [[1, 2, 3]] * 2}, r"is \[2, 3\], the model has 2 layers of 4"),
        ({"logical_count": [[1, 2, 3, -4]] * 2}, "counts are not negative"),
        ({"logical_count": [[True, 1, 1, 1], [1, 1, 1, 1]]}, "true or false among"),
        ('{"logical_count": [], "logical_count": [[1, 1, 1, 1]]}', "appears twice"),
        ({"something": 1}, "neither physical_to_logical_map nor logical_count"),
        ({"physical_to_logical_map": [[0], [1, 2]]}, "cannot be read"),
        ('{"physical_to_logical_map": [', "cannot be read"),
        ('{"physical_to_logical_map": [[0, 1, 2, 3, 0, 0.5], [0, 1, 2, 3, 0, 0]]}', "whole"),
        ('{"physical_to_logical_map": [["0", "1"], ["2", "3"]]}', "whole numbers"),
        ({"physical_to_logical_map": [[2**63] * 6] * 2}, "whole numbers"),
        ({"physical_to_logical_map": [[2**63 - 1] * 6] * 2}, "layer 0 .* each of 4 experts"),
        ('{"logical_count": [[NaN, 1, 1, 1], [1, 1, 1, 1]]}', "finite numbers"),
        ('{"logical_count": null}', "finite numbers"),
        ({"logical_count": [[10**400] * 4] * 2}, "finite numbers"),
        ('{"logical_count": ' + "[" * 5000, "cannot be read"),
    ],
)
def test_a_location_of_another_model_is_refused(given, match):
    with pytest.raises(ConfigError, match=match):
        placed(*location(given))


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"nothing at all")
    with pytest.raises(ConfigError, match="--init-expert-location.*x.safetensors"):
        read_location(str(tmp_path / "x.safetensors"))


def test_what_was_moved_is_where_it_is_looked_for():
    places = ExpertMap(np.array(MAP), 4, 0, 2, "static")
    places.enter(1, [3, 3, 0, 1, 2, 3])
    assert places.tables[1].copies.tolist() == [1, 1, 1, 3]
    assert places.tables[1].slots[3].tolist() == [0, 1, 5]
    assert places.tables[0].copies.tolist() == [2, 1, 1, 2]


def test_the_defaults_place_nothing():
    assert (ExpertsConfig().redundant, ExpertsConfig().location) == (0, "trivial")
