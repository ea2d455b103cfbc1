"""Towers against transformers: features of pictures and clips, whole and in pieces."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.base.errors import ModelError
from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.towers.vision import VisionTower
from banyan.models.weights.loader import load_tower
from banyan.ops.bind import bind
from tests.support.multimodal import (
    normalized,
    picture_features,
    qwen_features,
    random_content,
    tiny,
)

QWEN = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "paddleocr_vl"]
OPS = bind("cpu", torch.device("cpu"), torch.float32, frozenset(), 16)
GRIDS = [(1, 2, 2), (1, 6, 22), (1, 18, 14), (3, 8, 10)]


def features(tower: VisionTower, content, grid, pieces=()) -> torch.Tensor:
    """The feature rows of one item.

    Args:
        pieces: number of blocks of each piece; () = one piece.
    """
    state, first = tower.begin(content, grid), 0
    for blocks in pieces or (tower.blocks,):
        tower.run(state, first, blocks)
        first += blocks
    return tower.end(state)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a part of the largest value."""
    assert expected.std() > 0.02
    return float((found - expected).abs().max() / expected.abs().max())


def content_of(tower: VisionTower, grid, seed: int = 0) -> torch.Tensor:
    config = tower.config
    values = config.channels * config.temporal_patch * config.patch**2
    return random_content(grid[0] * grid[1] * grid[2], values, seed)


SQUARES = ["gemma3", "llava", "llava_siglip", "smolvlm", "internvl", "internvl_6b", "llama4"]
RAGGED = ["pixtral", "mistral3"]
TILES = [(1, 6, 6), (3, 6, 6)]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", SQUARES + RAGGED)
def test_features_of_other_towers_equal_those_of_transformers(family, seed, tmp_path):
    reference = tiny(family, tmp_path, seed)
    model_config = read_model_config(str(tmp_path))
    tower = load_tower(model_config, Build(OPS))
    merge = tower.config.merge

    for grid in TILES if family in SQUARES else [(1, 2, 4), (1, 6, 14), (1, 12, 10)]:
        content = content_of(tower, grid, seed)
        found = features(tower, content, grid)

        pixels = normalized(content, tower.config.mean, tower.config.std)
        expected = picture_features(reference, pixels, grid)
        assert found.shape == (grid[0] * grid[1] * grid[2] // merge**2, tower.width)
        assert error_of(found, expected) < 1e-5, grid
        assert torch.equal(features(tower, content, grid, [1] * tower.blocks), found)


PAIRS = [(family, seed) for family in QWEN for seed in (0, 1)]


@pytest.fixture(params=PAIRS, ids=str, scope="module")
def pair(request, tmp_path_factory):
    """A tower and transformers' model."""
    family, seed = request.param
    folder = tmp_path_factory.mktemp(family)
    reference = tiny(family, folder, seed)
    return load_tower(read_model_config(str(folder)), Build(OPS)), reference


@pytest.mark.parametrize("grid", GRIDS)
def test_features_of_qwen_towers_equal_those_of_transformers(pair, grid):
    tower, reference = pair
    content = content_of(tower, grid)

    found = features(tower, content, grid)

    pixels = normalized(content, tower.config.mean, tower.config.std)
    expected = qwen_features(reference, pixels, grid)
    assert found.shape == (grid[0] * grid[1] * grid[2] // 4, tower.width)
    assert error_of(found, expected) < 1e-5


def test_features_are_the_same_bits_in_pieces_of_any_size(pair):
    tower, _ = pair
    grid = GRIDS[1]
    content = content_of(tower, grid)

    expected = features(tower, content, grid)

    for pieces in ([1] * tower.blocks, [1, tower.blocks - 1], [tower.blocks - 1, 1]):
        assert torch.equal(features(tower, content, grid, pieces), expected)


def test_items_that_are_walked_in_turns_have_the_features_that_they_have_alone(pair):
    tower, _ = pair
    items = [(content_of(tower, grid, at), grid) for at, grid in enumerate(GRIDS)]
    alone = [features(tower, *item) for item in items]

    states = [tower.begin(*item) for item in items]
    for block in range(tower.blocks):
        for state in states:
            tower.run(state, block, 1)

    for state, expected in zip(states, alone, strict=True):
        assert torch.equal(tower.end(state), expected)


def test_features_depend_on_the_order_of_rows_and_columns(pair):
    """Pictures with the same patches in another grid differ, so positions have an effect."""
    tower, _ = pair
    content = content_of(tower, (1, 4, 8))

    wide, high = (features(tower, content, grid) for grid in ((1, 4, 8), (1, 8, 4)))

    assert error_of(wide, high) > 1e-3


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_names_with_and_without_model_in_front_are_read(family, tmp_path):
    tiny(family, tmp_path)
    grid = (1, 4, 6)
    before = load_tower(read_model_config(str(tmp_path)), Build(OPS))
    content = content_of(before, grid)
    weights = load_file(tmp_path / "model.safetensors")

    def other(name: str) -> str:
        is_long = name.startswith("model.visual.")
        return name.removeprefix("model.") if is_long else f"model.{name}"

    weights = {other(n) if "visual." in n else n: weight for n, weight in weights.items()}
    save_file(weights, tmp_path / "model.safetensors")

    after = load_tower(read_model_config(str(tmp_path)), Build(OPS))

    assert torch.equal(features(after, content, grid), features(before, content, grid))


def test_a_weight_of_no_known_place_is_an_error(tmp_path):
    tiny("qwen3_vl", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        weights | {"model.visual.other.weight": torch.ones(3)}, tmp_path / "model.safetensors"
    )

    with pytest.raises(ModelError, match=r"visual\.other"):
        load_tower(read_model_config(str(tmp_path)), Build(OPS))


def test_a_dummy_tower_makes_rows_of_numbers(tmp_path):
    tiny("qwen2_5_vl", tmp_path)
    tower = load_tower(read_model_config(str(tmp_path)), Build(OPS), "dummy", seed=3)

    found = features(tower, content_of(tower, (1, 4, 4)), (1, 4, 4))

    assert found.shape == (4, tower.width)
    assert found.isfinite().all()


def test_costs_grow_with_the_grid_and_windows_save_most_of_the_attention(tmp_path):
    tiny("qwen2_5_vl", tmp_path)
    model_config = read_model_config(str(tmp_path))
    tower = load_tower(model_config, Build(OPS), "dummy")
    plain = replace(model_config.media.tower, window=0)
    model_config = replace(model_config, media=replace(model_config.media, tower=plain))
    without = VisionTower(model_config, Build(OPS))

    assert tower.cost((1, 64, 64)) < without.cost((1, 64, 64))
    assert 2 * without.cost((1, 64, 64)) == without.cost((2, 64, 64))
    assert without.cost((1, 128, 64)) > 2 * without.cost((1, 64, 64))
