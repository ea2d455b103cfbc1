"""Positions with axes against transformers' `get_rope_index`."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from banyan.layers.rotary import axis_shifts
from banyan.messages.plan import PlacedSpan

TEXT, IMAGE = 0, 1
GRIDS = [(1, 4, 6), (9, 2, 2), (1, 10, 4)]


@pytest.mark.parametrize("grids", [[], GRIDS[:1], GRIDS[:2], GRIDS], ids=len)
@pytest.mark.parametrize("text", [1, 9])
def test_positions_of_grids_and_text_are_those_of_transformers(grids, text):
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    kinds, spans = [TEXT] * text, []
    for times, height, width in grids:
        shape = (times, height // 2, width // 2)
        spans.append(PlacedSpan(len(kinds), int(np.prod(shape)), 1, 0, shape))
        kinds += [IMAGE] * spans[-1].count + [TEXT] * text

    shifts, later = axis_shifts(spans, len(kinds))

    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = Qwen2_5_VLModel.get_vision_position_ids.__get__(model)
    expected, delta = Qwen2_5_VLModel.get_rope_index(
        model,
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds]),
        torch.tensor(grids) if grids else None,
    )
    found = np.arange(len(kinds))[:, None] + shifts
    assert np.array_equal(found.T, expected[:, 0].numpy())
    assert later == int(delta)


def test_a_line_has_the_positions_of_text():
    shifts, later = axis_shifts([PlacedSpan(2, 5, 1, 0, (1, 1, 0))], 9)
    assert not shifts.any() and not later
