"""Sparse latent attention of a layer that drafts, on the emulated NPU: of position 0, which holds
nothing there, nobody reads."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from banyan.ascend.ops import latent_attention
from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.toolkit import NpuToolkit
from banyan.ops import reference
from banyan.ops.api import IndexShape

PAGES, PAGE, SCALE, COUNTS, CONTEXTS = 6, 128, 0.05, (1, 3, 2), (256, 1, 130)
"""Of pages, of tokens that a row runs, and of those before them."""
DIMS = {"served": (512, 64, 64, 64), "others": (96, 16, 24, 8)}
"""Widths of a latent and its key, and of both parts of an indexer's."""


@dataclass
class Scene:
    """
    Attributes:
        asked: an indexer's queries, turned ones and weights.
        keys: what pages keep for it.
        q, kept: of latent attention.
        rows: tables, starts and contexts.
    """

    asked: list[Tensor]
    keys: list[Tensor]
    q: list[Tensor]
    kept: list[Tensor]
    rows: list[Tensor]


def scene(dims: tuple[int, ...], worth: int) -> Scene:
    """What an indexer multiplies are numbers whose sums are the same in any order.

    worth: 1 = each row's position 0 has the best key of all, -1 = the worst.
    """
    generator = torch.Generator().manual_seed(3)
    latent, key, plain, turning = dims
    total = sum(COUNTS)

    def small(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).half()

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).half()

    asked = [small(total, 4, plain), small(total, 4, turning), torch.ones(total, 4).half()]
    asked[0] += 2
    keys = [small(PAGES, PAGE, width) for width in (plain, turning)]
    tables = torch.tensor([[5, 1, 0], [4, 0, 0], [3, 2, 0]], dtype=torch.int32)
    for page in tables[:, 0]:
        keys[0][page, 0] = 8 * worth
    starts = torch.tensor([0, *COUNTS]).cumsum(0)
    queries = [drawn(total, 4, latent), drawn(total, 4, key)]
    kept = [drawn(PAGES, PAGE, latent), drawn(PAGES, PAGE, key)]
    return Scene(asked, keys, queries, kept, [tables, starts, torch.tensor(CONTEXTS)])


def on_npu(found: Scene, top: int, first: int) -> tuple[Tensor, Tensor]:
    """What is chosen, and what attention makes of it."""

    def on(parts: list[Tensor]) -> list[Tensor]:
        return [part.to("npu") for part in parts]

    toolkit = NpuToolkit(Operators(True))
    keys = on(found.keys)
    dims = (found.kept[0].shape[-1], found.kept[1].shape[-1])
    width = sum(part.shape[-1] for part in keys)
    if toolkit.joins_index(IndexShape(4, width, top, *dims)):
        keys = [torch.cat(keys, -1)] * 2
    tables, starts, contexts = found.rows
    rows = (tables.to("npu"), starts, contexts)
    choose = latent_attention.choose_positions.function(toolkit)
    chosen = choose(*on(found.asked), *keys, *rows, top, first)
    attend = latent_attention.latent_attention.function(toolkit)
    return chosen, attend(*on(found.q), *on(found.kept), *rows, SCALE, chosen, first)


@pytest.mark.parametrize("top", [16, 255, 2048])
@pytest.mark.parametrize("worth", [1, -1], ids=["best", "worst"])
@pytest.mark.parametrize("dims", DIMS)
def test_position_0_of_a_layer_that_drafts_is_not_read(npu, dims: str, worth: int, top: int):
    """Whether its key is the best or the worst of all, among as many as are chosen or more."""
    found = scene(DIMS[dims], worth)
    bits = reference.choose_positions(*found.asked, *found.keys, *found.rows, top, 1)
    halves = [part.float() for part in (*found.q, *found.kept)]
    wanted = reference.latent_attention(*halves, *found.rows, SCALE, bits, 1)
    chosen, got = on_npu(found, top, 1)
    assert torch.allclose(got.cpu().float(), wanted, atol=2e-3, rtol=2e-3)
    if dims == "served":
        seen = reference.unpack_bits(bits)
        places = [line[line >= 0].sort().values.tolist() for line in chosen[:, 0].cpu()]
        assert places == [line.nonzero()[:, 0].tolist() for line in seen]
        assert chosen.shape == (sum(COUNTS), 1, top)
    if worth == 1:
        assert not torch.equal(on_npu(found, top, 0)[1].cpu(), got.cpu())


def test_a_choice_that_leaves_no_room_for_position_0_is_the_references(npu) -> None:
    """The operator counts no further than 8192."""
    toolkit = NpuToolkit(Operators(True))
    joined = [toolkit.joins_index(IndexShape(64, 128, top, 512, 64)) for top in (2048, 7168, 8192)]
    assert joined == [True, True, False]
