"""What the operators of latent attention, of sinks and of experts refuse for the numbers that they
are given, and what they take."""

import pytest
import torch

from banyan.ascend.ops.contracts import ContractError
from banyan.ascend.ops.operators import Operators
from tests.support.emulated_pages import HEADS, LENGTHS, PAGES, Scene, random


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"])
def operators(npu, request) -> Operators:
    return Operators(is_checked=request.param)


def test_rows_of_the_most_tokens_over_latents_are_taken(operators, on):
    queries = (on(random(48, 32, 512)), on(random(48, 32, 64)))
    pages = (on(random(PAGES, 128, 512)), on(random(PAGES, 128, 64)))
    table = on(torch.ones(3, 4, dtype=torch.int32))
    given = (*queries, *pages, table, [16, 32, 48], [130, 257, 25], 0.1)
    assert operators.attention.attend_latents(*given).shape == (48, 32, 512)


def test_experts_that_are_not_there(operators, on):
    ids = torch.full((3, 2), 4, dtype=torch.int32)
    with pytest.raises(ContractError, match="experts must be 0 to 3"):
        operators.experts.init_routing(on(random(3, 8)), on(ids), 0, 4, 4)


def test_more_rows_of_groups_than_there_are(operators, on):
    counts = on(torch.tensor([3, 1]))
    with pytest.raises(ContractError, match="have 4 rows together, there are 3"):
        operators.experts.grouped_matmul(on(random(3, 8)), on(random(2, 8, 4)), counts)
    numbers, columns = (torch.ones(shape, dtype=torch.int8) for shape in ((3, 32), (2, 32, 64)))
    given = (on(numbers), on(columns), counts, on(random(2, 64)), on(torch.ones(3)))
    with pytest.raises(ContractError, match="have 4 rows together, there are 3"):
        operators.experts.grouped_quant_matmul(*given, torch.bfloat16)


def test_places_of_rows_that_are_not_there(operators, on):
    there = on(torch.tensor([0, 1, 2, 4], dtype=torch.int32))
    with pytest.raises(ContractError, match="sorted_indices must be 0 to 3"):
        operators.experts.token_unpermute(on(random(4, 8)), there, on(random(2, 2)))


def test_lengths_of_a_graph_with_sinks_go_by_the_names_of_the_newer_operator(operators, on):
    scene, graph = Scene(on, 64), torch.npu.NPUGraph()
    given = scene.query() | {"sinks": on(random(HEADS))}
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        out = scene.single(operators, **given, lengths=[1, 1, 1])
    graph.update(cpu_update_input=[{"actual_seq_kvlen": LENGTHS}])
    graph.replay()
    assert torch.equal(out.cpu(), scene.single(operators, **given).cpu())
