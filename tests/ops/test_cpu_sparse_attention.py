"""Compiled choice of positions and attention to them, against the reference and against dense."""

import pytest
import torch

from banyan.ops import reference
from banyan.ops.cpu.latent_attention import LatentAttention
from banyan.ops.pages import stored_width
from banyan.ops.reference import unpack_bits
from tests.ops.test_cpu_latent_attention import DTYPES, SCALE, Shape, World

HEADS, PLAIN, TURNED = 21, 20, 6


@pytest.fixture
def attention(library):
    return LatentAttention(library)


class Sparse(World):
    """With an indexer's queries, weights and keys."""

    def __init__(self, shape: Shape, lengths: list[int], **more) -> None:
        super().__init__(shape, lengths, **more)
        generator = torch.Generator().manual_seed(7)

        def random(*sizes):
            return [torch.randn(length, *sizes, generator=generator) for length in lengths]

        self.index_q, self.index_turned = random(HEADS, PLAIN), random(HEADS, TURNED)
        self.weights = random(HEADS)
        self.index_key, self.index_key_turned = random(PLAIN), random(TURNED)

    def choose(self, ops, chunks, top: int, **more) -> torch.Tensor:
        dtype, size = self.shape.dtype, self.shape.page_size
        pages = [
            torch.zeros(self.num_pages, size, stored_width(width, dtype), dtype=dtype)
            for width in (PLAIN, TURNED)
        ]
        whole = [(row, 0, last) for row, _, last in chunks]
        keys = (self.chunk(of, whole) for of in (self.index_key, self.index_key_turned))
        ops.write_latent(*keys, *pages, self.locations(whole))
        queries = (self.index_q, self.index_turned, self.weights)
        of_chunks = (self.chunk(of, chunks) for of in queries)
        return ops.choose_positions(*of_chunks, *pages, *self.geometry(chunks), top, **more)

    def geometry(self, chunks):
        counts = torch.tensor([0] + [last - first for _, first, last in chunks])
        contexts = torch.tensor([first for _, first, _ in chunks], dtype=torch.int32)
        tables = self.tables[[row for row, _, _ in chunks]].contiguous()
        return tables, counts.cumsum(0).int(), contexts

    def attend(self, ops, chunks, chosen) -> torch.Tensor:
        pages = self.pages()
        whole = [(row, 0, last) for row, _, last in chunks]
        latent, key = self.chunk(self.latent, whole), self.chunk(self.key, whole)
        ops.write_latent(latent, key, *pages, self.locations(whole))
        queries = self.chunk(self.q, chunks), self.chunk(self.turned, chunks)
        return ops.latent_attention(*queries, *pages, *self.geometry(chunks), SCALE, chosen)


def positions(words: torch.Tensor, chunks) -> list[list[int]]:
    """What each token reads of the positions up to its own."""
    owns = [at for _, first, last in chunks for at in range(first, last)]
    rows = unpack_bits(words)
    return [
        row[: own + 1].nonzero().flatten().tolist() for row, own in zip(rows, owns, strict=True)
    ]


CHUNKS = [(0, 250, 300), (1, 690, 700), (2, 39, 40), (1, 0, 5), (3, 0, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top", [1, 40, 290, 5000])
def test_the_positions_and_what_they_give_are_those_of_the_reference(attention, dtype, top):
    world = Sparse(Shape(dtype=dtype), [300, 700, 40, 1])

    chosen = world.choose(attention, CHUNKS, top)

    wanted = world.choose(reference, CHUNKS, top)
    found, expected = positions(chosen, CHUNKS), positions(wanted, CHUNKS)
    owns = [at for _, first, last in CHUNKS for at in range(first, last)]
    assert [len(of) for of in found] == [min(top, own + 1) for own in owns]
    # Rounding may turn two scores that are nearly equal, at the edge of the choice.
    changed = sum(len(set(a) ^ set(b)) for a, b in zip(found, expected, strict=True))
    assert changed <= 4
    out = world.attend(attention, CHUNKS, chosen)
    torch.testing.assert_close(out, world.attend(reference, CHUNKS, chosen), atol=3e-5, rtol=0)


@pytest.mark.parametrize("top", [1, 40, 299, 300])
def test_positions_that_hold_nothing_are_not_chosen_and_take_nobodys_place(attention, top):
    """The first of them would be the best, or no number at all."""
    chunks = [(0, 250, 300), (1, 690, 700), (2, 39, 40), (1, 5, 9)]
    world = Sparse(Shape(), [300, 700, 40])
    for keys in (world.index_key, world.index_key_turned):
        for key in keys:
            key[:3] = float("nan")
    owns = [at for _, first, last in chunks for at in range(first, last)]

    found = [
        positions(world.choose(ops, chunks, top, first=3), chunks) for ops in (attention, reference)
    ]

    for reads in found:
        assert [len(of) for of in reads] == [min(top, own - 2) for own in owns]
        assert all(min(of) >= 3 for of in reads)
    changed = sum(len(set(a) ^ set(b)) for a, b in zip(*found, strict=True))
    assert changed <= 4


def test_a_context_that_is_not_longer_than_the_choice_has_the_bits_of_dense_attention(attention):
    world = Sparse(Shape(), [300, 700, 40, 1])

    for ops in (attention, reference):
        chosen = world.choose(ops, CHUNKS, 700)
        assert torch.equal(world.attend(ops, CHUNKS, chosen), world.attend(ops, CHUNKS, None))


@pytest.mark.parametrize("top", [3, 100])
def test_a_token_has_the_same_bits_however_its_step_is_cut(attention, top):
    world = Sparse(Shape(heads=6), [530, 300])
    whole = [(0, 0, 530)]
    chosen = world.choose(attention, whole, top)
    out, reads = world.attend(attention, whole, chosen), positions(chosen, whole)

    for first, last in ((0, 1), (255, 256), (256, 257), (257, 529), (529, 530)):
        chunks = [(1, 200, 300), (0, first, last), (1, 100, 101)]
        mine = world.choose(attention, chunks, top)
        assert positions(mine, chunks)[100 : 100 + last - first] == reads[first:last]
        part = world.attend(attention, chunks, mine)[100 : 100 + last - first]
        assert torch.equal(part, out[first:last])


def test_the_lower_of_equal_positions_are_read(attention):
    world = Sparse(Shape(), [600])
    world.index_key[0][:] = 1.0
    world.index_key_turned[0][:] = 1.0
    world.weights[0].abs_()
    chunks = [(0, 599, 600)]

    for ops in (attention, reference):
        assert positions(world.choose(ops, chunks, 5), chunks) == [[0, 1, 2, 3, 4]]
