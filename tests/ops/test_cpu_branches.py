"""Drafts that branch: each token attends as at the end of a chain of its own, bit for bit."""

import math
from random import Random

import pytest
import torch
from torch import Tensor

from banyan.ops import reference
from banyan.ops.cpu import paged_attention as compiled
from banyan.ops.cpu import torch_attention
from banyan.ops.cpu.latent_attention import LatentAttention
from banyan.ops.cpu.paged_attention import PagedAttention
from banyan.ops.pages import FLOAT8, stored_width

KV_HEADS, GROUP, DIM, RANK, TURNED = 2, 3, 32, 40, 24
NODES, MOST = 13, 16
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, *FLOAT8)


class Branches:
    """A row that has read `context` tokens and runs a tree of others. parents: of each node, the
    first of which is the root."""

    def __init__(self, context: int, page: int, seed: int = 0) -> None:
        random = Random(seed)
        self.context, self.page = context, page
        self.parents = [-1, *(random.randrange(i) for i in range(1, NODES))]
        self.tables = torch.randperm(self.columns(context + NODES) + 4)[None].int() + 1
        self.generator = torch.Generator().manual_seed(seed)

    def columns(self, length: int) -> int:
        return -(-length // self.page)

    def path(self, node: int) -> list[int]:
        """The nodes from the root to this one."""
        return [*(self.path(self.parents[node]) if node else ()), node]

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(self.context + NODES, *shape, generator=self.generator)

    def where(self, positions: list[int]) -> Tensor:
        at = torch.tensor(positions)
        return self.tables[0, at // self.page].long() * self.page + at % self.page

    def pages(self, *shape: int, dtype: torch.dtype) -> Tensor:
        nothing = -1 if dtype == torch.int8 else math.nan
        pages = torch.empty(self.tables.shape[1] + 2, self.page, *shape, dtype=dtype)
        return pages.fill_(nothing)

    @property
    def paths(self) -> Tensor:
        found = torch.zeros(NODES, 2 + MOST, dtype=torch.int32)
        for node in range(NODES):
            path = self.path(node)
            found[node, :2] = torch.tensor([self.context, len(path)])
            found[node, 2 : 2 + len(path)] = torch.tensor(path) + self.context
        return found

    def branch(self, node: int) -> list[int]:
        """Of all tokens, those that a chain to this node consists of."""
        return [*range(self.context), *(self.context + n for n in self.path(node))]

    def geometry(self, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        starts = torch.tensor([0, count], dtype=torch.int32)
        return self.tables, starts, torch.tensor([first], dtype=torch.int32)


@pytest.mark.parametrize(("context", "window"), [(0, 0), (250, 0), (600, 300), (256, 4)])
@pytest.mark.parametrize(
    ("dtype", "page"),
    [
        (torch.float32, 16),
        (torch.float16, 64),
        (torch.bfloat16, 16),
        (torch.int8, 256),
        (torch.float8_e4m3fn, 32),
    ],
    ids=str,
)
def test_a_token_reads_the_tokens_above_it_and_no_others(
    library, context: int, window: int, dtype: torch.dtype, page: int
):
    attention, world = PagedAttention(library), Branches(context, page)
    q, k, v = world.numbers(KV_HEADS * GROUP, DIM), *(world.numbers(KV_HEADS, DIM) for _ in "kv")
    width = stored_width(DIM, dtype)

    def attend(tokens: list[int], first: int, paths: Tensor | None) -> Tensor:
        pages = [world.pages(KV_HEADS, width, dtype=dtype) for _ in "kv"]
        where = world.where(list(range(len(tokens))))
        attention.write_kv(k[tokens], v[tokens], *pages, where)
        run = q[tokens][first:]
        geometry = world.geometry(first, len(run))
        return attention.paged_attention(run, *pages, *geometry, 0.3, window, 0.0, paths=paths)

    found = attend(list(range(context + NODES)), context, world.paths)
    for node in range(0, NODES, 3):
        tokens = world.branch(node)
        assert torch.equal(found[node], attend(tokens, len(tokens) - 1, None)[0]), node


@pytest.mark.parametrize("context", [5, 600])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("top", [0, 9])
def test_latents_and_what_an_indexer_chooses_follow_the_branch(
    library, context: int, dtype: torch.dtype, top: int
):
    attention, world = LatentAttention(library), Branches(context, 16)
    heads = 4
    q, turned = world.numbers(heads, RANK), world.numbers(heads, TURNED)
    latent, key = world.numbers(RANK), world.numbers(TURNED)
    weights, index, index_turned = (world.numbers(n) for n in (heads, RANK, TURNED))
    widths = [stored_width(n, dtype) for n in (RANK, TURNED)]

    def attend(tokens: list[int], first: int, paths: Tensor | None) -> Tensor:
        pages = [world.pages(n, dtype=dtype) for n in (*widths, *widths)]
        where = world.where(list(range(len(tokens))))
        attention.write_latent(latent[tokens], key[tokens], *pages[:2], where)
        attention.write_latent(index[tokens], index_turned[tokens], *pages[2:], where)
        run = torch.tensor(tokens[first:])
        geometry, chosen = world.geometry(first, len(run)), None
        if top:
            asked = (q[run], turned[run], weights[run])
            chosen = attention.choose_positions(*asked, *pages[2:], *geometry, top, paths=paths)
        asked = (q[run], turned[run], *pages[:2], *geometry)
        return attention.latent_attention(*asked, 0.3, chosen, paths=paths)

    found = attend(list(range(context + NODES)), context, world.paths)
    for node in range(0, NODES, 3):
        tokens = world.branch(node)
        assert torch.equal(found[node], attend(tokens, len(tokens) - 1, None)[0]), node


@pytest.mark.parametrize(("context", "window"), [(0, 0), (100, 0), (100, 4)])
@pytest.mark.parametrize("run", [reference.paged_attention, torch_attention.paged_attention.run])
def test_plain_torch_reads_the_same(run, context: int, window: int):
    world = Branches(context, 16)
    q, k, v = world.numbers(KV_HEADS * GROUP, DIM), *(world.numbers(KV_HEADS, DIM) for _ in "kv")

    def attend(tokens: list[int], first: int, paths: Tensor | None) -> Tensor:
        pages = [world.pages(KV_HEADS, DIM, dtype=torch.float32) for _ in "kv"]
        reference.write_kv(k[tokens], v[tokens], *pages, world.where(list(range(len(tokens)))))
        asked = q[tokens][first:]
        return run(asked, *pages, *world.geometry(first, len(asked)), 0.3, window, 0.0, paths=paths)

    found = attend(list(range(context + NODES)), context, world.paths)
    for node in range(NODES):
        tokens = world.branch(node)
        right = attend(tokens, len(tokens) - 1, None)[0]
        torch.testing.assert_close(found[node], right, rtol=0, atol=1e-6)


def test_rows_next_to_one_that_branches_are_computed_as_without_it(library):
    """One is in the middle of a prompt, one at its end, and they share pages with it."""
    attention, world = PagedAttention(library), Branches(600, 16)
    q, k, v = world.numbers(KV_HEADS * GROUP, DIM), *(world.numbers(KV_HEADS, DIM) for _ in "kv")
    pages = [world.pages(KV_HEADS, DIM, dtype=torch.float16) for _ in "kv"]
    attention.write_kv(k, v, *pages, world.where(list(range(600 + NODES))))

    def attend(rows: list[tuple[int, int]], paths: Tensor | None) -> Tensor:
        spans = [torch.arange(first, first + count) for first, count in rows]
        starts = torch.tensor([0, *(len(s) for s in spans)]).cumsum(0).int()
        tables = world.tables.expand(len(rows), -1).contiguous()
        contexts = torch.tensor([first for first, _ in rows], dtype=torch.int32)
        asked = (q[torch.cat(spans)], *pages, tables, starts, contexts, 0.3, 0, 0.0)
        return attention.paged_attention(*asked, paths=paths)

    rows = [(530, 20), (600, NODES), (599, 1)]
    paths = torch.zeros(20 + NODES + 1, 2 + MOST, dtype=torch.int32)
    paths[20 : 20 + NODES] = world.paths
    found = attend(rows, paths)
    assert torch.equal(found[:20], attend(rows[:1], None))
    assert torch.equal(found[20 : 20 + NODES], attend(rows[1:2], world.paths))
    assert torch.equal(found[20 + NODES :], attend(rows[2:], None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_that_are_moved_are_as_if_written_there(library, dtype: torch.dtype):
    world, attention = Branches(20, 16), PagedAttention(library)
    k, v = (world.numbers(KV_HEADS, DIM) for _ in "kv")
    width = stored_width(DIM, dtype)
    for write, move in (
        (attention.write_kv, compiled.move_kv),
        (reference.write_kv, reference.move_kv),
    ):
        moved, right = ([world.pages(KV_HEADS, width, dtype=dtype) for _ in "kv"] for _ in "ab")
        write(k, v, *moved, world.where(list(range(20 + NODES))))
        move(*moved, world.where([22, 25, 32]), world.where([21, 22, 23]))
        tokens = [*range(21), 22, 25, 32, *range(24, 20 + NODES)]
        write(k[tokens], v[tokens], *right, world.where(list(range(20 + NODES))))
        for one, other in zip(moved, right, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
