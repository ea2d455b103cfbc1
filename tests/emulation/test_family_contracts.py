"""What the operators of latent attention, of sinks and of experts refuse."""

import pytest
import torch

from banyan.ops.npu.contracts import ContractError
from banyan.ops.npu.operators import Operators
from tests.emulation.test_contracts import HEADS, LENGTHS, PAGES, Scene, random


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"])
def operators(npu, request) -> Operators:
    return Operators(is_checked=request.param)


def latents(on, operators: Operators, heads: int = 32, count: int = 1, **changed) -> torch.Tensor:
    """Three rows of `count` tokens over latents."""
    shape = (3, heads) if count == 1 else (3 * count, heads)
    shape = (3, 1, heads) if count == 1 else shape
    given = {
        "query": on(random(*shape, 512)),
        "query_rope": on(random(*shape, 64)),
        "latents": on(random(PAGES, 128, 512)),
        "key_rope": on(random(PAGES, 128, 64)),
        "table": on(torch.ones(3, 4, dtype=torch.int32)),
        "ends": None if count == 1 else [count, 2 * count, 3 * count],
        "lengths": [130, 257, 25],
        "scale": 0.1,
    }
    return operators.attend_latents(**given | {k: make(on) for k, make in changed.items()})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"query": lambda on: on(random(3, 1, 32, 256))}, "latents have 512 dimensions"),
        ({"query_rope": lambda on: on(random(3, 1, 32, 32))}, "but 64 wide"),
        ({"query_rope": lambda on: on(random(3, 1, 32, 64).half())}, "must have one dtype"),
        ({"query_rope": lambda on: None}, "come together or not at all"),
        ({"key_rope": lambda on: on(random(PAGES - 1, 128, 64))}, "but 64 wide"),
        ({"key_rope": lambda on: random(PAGES, 128, 64)}, "key_rope must lie on the NPU"),
        (
            {
                "latents": lambda on: on(random(PAGES, 256, 512)),
                "key_rope": lambda on: on(random(PAGES, 256, 64)),
            },
            "block_size must be 128 or 16, it is 256",
        ),
    ],
)
def test_latents(operators, on, changed, why):
    if changed.keys() == {"query"}:  # pages of that width, so that nothing else is in the way
        changed = changed | {"latents": lambda on: on(random(PAGES, 128, 256))}
    with pytest.raises(ContractError, match=why):
        latents(on, operators, **changed)


def test_heads_and_rows_that_latents_do_not_take(operators, on):
    with pytest.raises(
        ContractError, match="128 or 32 or 64 heads and 1 kv head; they have 512, 4"
    ):
        latents(on, operators, heads=4)
    with pytest.raises(ContractError, match="at most 16 tokens, one has 17"):
        latents(on, operators, count=17)
    assert latents(on, operators, count=16).shape == (48, 32, 512)


@pytest.mark.parametrize(
    ("sinks", "why"),
    [
        (random(HEADS).half(), "learnable_sink must be torch.bfloat16"),
        (random(HEADS - 1), r"learnable_sink must be \[8\]"),
    ],
)
def test_sinks(operators, on, sinks, why):
    with pytest.raises(ContractError, match=why):
        Scene(on, 64).single(operators, sinks=on(sinks))


@pytest.mark.parametrize(
    ("x", "ids", "why"),
    [
        (random(3, 8), torch.zeros(3, 2), "expert_idx must be torch.int32"),
        (random(3, 8), torch.zeros(2, 2, dtype=torch.int32), r"x must be \[tokens, dim\]"),
        (random(3, 8), torch.zeros(3, 5, dtype=torch.int32), "1 to 4 of 4 experts, not 5"),
        (random(3, 8), torch.full((3, 2), 4, dtype=torch.int32), "experts must be 0 to 3"),
        (random(3, 8).int(), torch.zeros(3, 2, dtype=torch.int32), "x must be torch.bfloat16"),
    ],
)
def test_routing(operators, on, x, ids, why):
    with pytest.raises(ContractError, match=why):
        operators.init_routing(on(x), on(ids), 0, 4, 4)


@pytest.mark.parametrize(
    ("x", "weight", "counts", "why"),
    [
        (random(3, 8), random(2, 4, 8), [1, 2], r"weight \[groups, in, out\]"),
        (random(3, 8), random(2, 8, 4).half(), [1, 2], "must have one dtype"),
        (random(3, 8), random(2, 8, 4), [3, 1], "have 4 rows together, there are 3"),
        (random(3, 8), random(2, 8, 4), [3], "a number for each of 2 groups"),
        (random(3, 8), random(1, 8, 4), [3], "2 to 1024"),
        (random(3, 8), random(2, 8, 65536), [1, 2], "must be less than 65536, one is 65536"),
    ],
)
def test_products_by_group(operators, on, x, weight, counts, why):
    with pytest.raises(ContractError, match=why):
        operators.grouped_matmul(on(x), on(weight), on(torch.tensor(counts)))


NUMBERS, COLUMNS = torch.ones(3, 32, dtype=torch.int8), torch.ones(2, 32, 64, dtype=torch.int8)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"x": NUMBERS.to(torch.bfloat16)}, "must have one dtype|x must be torch.int8"),
        ({"weight": COLUMNS[:, :16].contiguous()}, r"weight \[groups, in, out\]"),
        ({"scale": torch.ones(2, 64)}, "scale must be torch.bfloat16"),
        ({"scale": torch.ones(2, 63, dtype=torch.bfloat16)}, r"scale must be \[2, 64\]"),
        ({"units": torch.ones(4)}, r"per_token_scale must be \[3\]"),
        ({"units": torch.ones(3, dtype=torch.bfloat16)}, "per_token_scale must be torch.float32"),
        ({"dtype": torch.float16}, "scale must be torch.float32"),
        ({"dtype": torch.float32}, "output_dtype"),
        ({"counts": torch.tensor([3, 1])}, "have 4 rows together, there are 3"),
    ],
)
def test_products_by_group_of_8_bits(operators, on, changed, why):
    given = {
        "x": NUMBERS,
        "weight": COLUMNS,
        "counts": torch.tensor([1, 2]),
        "scale": torch.ones(2, 64, dtype=torch.bfloat16),
        "units": torch.ones(3),
        "dtype": torch.bfloat16,
    } | changed
    there = {key: on(value) if torch.is_tensor(value) else value for key, value in given.items()}
    with pytest.raises(ContractError, match=why):
        operators.grouped_quant_matmul(**there)


@pytest.mark.parametrize(
    ("rows", "places", "weights", "why"),
    [
        (random(4, 8), [0, 1, 2], random(2, 2), "the same pairs of a token and an expert"),
        (random(4, 8), [0, 1, 2, 4], random(2, 2), "sorted_indices must be 0 to 3"),
        (random(4, 8).float(), [0, 1, 2, 3], random(2, 2).float(), "must be torch.bfloat16"),
    ],
)
def test_rows_of_a_token_together(operators, on, rows, places, weights, why):
    there = on(torch.tensor(places, dtype=torch.int32))
    with pytest.raises(ContractError, match=why):
        operators.token_unpermute(on(rows), there, on(weights))


def test_lengths_of_a_graph_with_sinks_go_by_the_names_of_the_newer_operator(operators, on):
    scene, graph = Scene(on, 64), torch.npu.NPUGraph()
    given = scene.query() | {"sinks": on(random(HEADS))}
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        out = scene.single(operators, **given, lengths=[1, 1, 1])
    graph.update(cpu_update_input=[{"actual_seq_kvlen": LENGTHS}])
    graph.replay()
    assert torch.equal(out.cpu(), scene.single(operators, **given).cpu())
