"""Compiled latent attention against the plain one, and against itself in every shape of a step."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from banyan.ops import reference
from banyan.ops.cpu.latent_attention import HeadLinear, LatentAttention
from banyan.ops.cpu.weights import Arena
from banyan.ops.pages import FLOAT8, stored_width, to_numbers, to_stored

SCALE = 0.2
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, *FLOAT8]
Chunk = tuple[int, int, int]
"""(request, first, last) position of a row."""


@pytest.fixture
def attention(library):
    return LatentAttention(library)


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    rank: int = 32
    rope_dim: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32


class World:
    """Requests with a whole history; pages hold nothing but what is in the past of a step.

    Args:
        shared: tokens that all requests begin with, in pages that all of them use.
    """

    def __init__(self, shape: Shape, lengths: list[int], shared: int = 0) -> None:
        generator = torch.Generator().manual_seed(3)
        self.shape = shape

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        pages = [math.ceil(length / shape.page_size) for length in lengths]
        common = shared // shape.page_size
        order = (torch.randperm(sum(pages) + 1, generator=generator) + 1).tolist()
        prefix = [order.pop() for _ in range(common)]
        self.num_pages = sum(pages) + 2
        self.tables = torch.zeros(len(lengths), max(pages) + 1, dtype=torch.int32)
        self.q, self.turned, self.latent, self.key = [], [], [], []
        for row, length in enumerate(lengths):
            mine = prefix + [order.pop() for _ in range(pages[row] - common)]
            self.tables[row, : pages[row]] = torch.tensor(mine)
            self.q.append(random(length, shape.heads, shape.rank))
            self.turned.append(random(length, shape.heads, shape.rope_dim))
            self.latent.append(random(length, shape.rank))
            self.key.append(random(length, shape.rope_dim))
            self.latent[row][:shared] = self.latent[0][:shared]
            self.key[row][:shared] = self.key[0][:shared]

    def pages(self) -> tuple[Tensor, Tensor]:
        dtype = self.shape.dtype
        nothing = -1 if dtype == torch.int8 else math.nan  # a scale of such bytes is no number
        widths = (stored_width(n, dtype) for n in (self.shape.rank, self.shape.rope_dim))
        latents, keys = (
            torch.full((self.num_pages, self.shape.page_size, width), nothing, dtype=dtype)
            for width in widths
        )
        return latents, keys

    def locations(self, chunks: list[Chunk]) -> Tensor:
        size, found = self.shape.page_size, []
        for row, first, last in chunks:
            where = torch.arange(first, last)
            found.append(self.tables[row].long()[where // size] * size + where % size)
        return torch.cat(found)

    def chunk(self, of: list[Tensor], chunks: list[Chunk]) -> Tensor:
        return torch.cat([of[row][first:last] for row, first, last in chunks])

    def step(self, ops, chunks: list[Chunk], first: int = 0) -> Tensor:
        """What `ops` make of the chunks, after they have written their past from `first` on."""
        pages = self.pages()
        for part in ([(row, first, begin) for row, begin, _ in chunks], chunks):
            if any(last > begin for _, begin, last in part):
                latent, key = self.chunk(self.latent, part), self.chunk(self.key, part)
                ops.write_latent(latent, key, *pages, self.locations(part))
        counts = torch.tensor([0] + [last - first for _, first, last in chunks])
        return ops.latent_attention(
            self.chunk(self.q, chunks),
            self.chunk(self.turned, chunks),
            *pages,
            self.tables[[row for row, _, _ in chunks]].contiguous(),
            counts.cumsum(0).int(),
            torch.tensor([begin for _, begin, _ in chunks], dtype=torch.int32),
            SCALE,
            first=first,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rank", "rope_dim"), [(16, 8), (37, 6), (256, 64)])
def test_pages_hold_what_the_reference_writes(attention, dtype, rank, rope_dim):
    world = World(Shape(rank=rank, rope_dim=rope_dim, dtype=dtype), [40])
    mine, theirs = world.pages(), world.pages()
    where = world.locations([(0, 0, 40)])
    latent, key = world.latent[0].clone(), world.key[0]
    latent[3], latent[4, 2] = 0, math.inf

    attention.write_latent(latent, key, *mine, where)
    reference.write_latent(latent, key, *theirs, where)

    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(mine, theirs, strict=True)
        if dtype != torch.int8
    )
    others = [i for i in range(40) if i != 4]
    for a, b in zip(mine, theirs, strict=True):
        a, b = (x.flatten(0, 1).view(torch.uint8)[where[others]] for x in (a, b))
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
def test_prompts_chunks_and_decoding_equal_the_reference(attention, dtype, page_size):
    world = World(Shape(page_size=page_size, dtype=dtype), [300, 700, 40, 1])
    chunks = [(0, 0, 300), (1, 600, 650), (2, 39, 40), (1, 699, 700), (3, 0, 1)]

    got = world.step(attention, chunks)

    torch.testing.assert_close(got, world.step(reference, chunks), atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_nobody_reads_at_the_beginning_may_be_no_number(attention, dtype):
    """The first position is never written. Everything else is as if all began one later."""
    world = World(Shape(dtype=dtype), [300, 700, 40, 2])
    chunks = [(0, 1, 300), (1, 600, 650), (2, 39, 40), (1, 699, 700), (3, 1, 2)]

    got = world.step(attention, chunks, first=1)

    torch.testing.assert_close(got, world.step(reference, chunks, first=1), atol=2e-5, rtol=0)
    alone = world.step(attention, [(3, 1, 2)], first=1)
    values = to_numbers(to_stored(world.latent[3][1:2], dtype))
    torch.testing.assert_close(alone, values[:, None].float().expand_as(alone), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("heads", "rank", "rope_dim"), [(1, 14, 6), (16, 64, 32), (40, 37, 8)])
def test_heads_and_widths_of_every_size(attention, heads, rank, rope_dim):
    world = World(Shape(heads, rank, rope_dim), [70, 400])
    chunks = [(0, 3, 70), (1, 397, 400)]

    got = world.step(attention, chunks)

    torch.testing.assert_close(got, world.step(reference, chunks), atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_token_has_the_same_bits_however_its_step_is_cut(attention, dtype):
    world = World(Shape(heads=6, dtype=dtype), [530, 300])
    whole = world.step(attention, [(0, 0, 530)])

    for cuts in ([0, 1, 255, 256, 257, 529, 530], [0, 100, 300, 530]):
        for first, last in zip(cuts, cuts[1:], strict=False):
            chunks = [(1, 200, 300), (0, first, last), (1, 100, 101)]
            part = world.step(attention, chunks)[100 : 100 + last - first]
            assert torch.equal(part, whole[first:last])


def test_rows_that_share_a_prefix_have_the_bits_of_rows_alone(attention):
    world = World(Shape(), [600] * 9, shared=512)
    chunks = [(row, 599, 600) for row in range(9)]

    together = world.step(attention, chunks)

    for row in range(9):
        assert torch.equal(together[row : row + 1], world.step(attention, [chunks[row]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(3, 16, 40), (2, 21, 7), (5, 1, 64)])
def test_each_head_goes_through_a_matrix_of_its_own(library, dtype, heads, outputs, inputs):
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(heads, outputs, inputs, generator=generator).to(dtype)
    apart = torch.randn(130, heads, inputs + 3, generator=generator)[..., :inputs]
    run = HeadLinear(library, Arena(), weight)

    together = run(apart)

    want = torch.einsum("thi,hoi->tho", apart.double(), weight.double())
    assert (together - want).abs().max() <= 1e-5 * want.abs().max()
    for tokens in (1, 2, 5, 13, 97):
        assert torch.equal(run(apart[:tokens]), together[:tokens])
