"""The NPU's operators: their numbers against plain torch, and for each contract a refusal."""

import math

import pytest
import torch

from banyan.ops import reference
from banyan.ops.npu.contracts import ContractError
from banyan.ops.npu.operators import Operators

HEADS, KV_HEADS, PAGE, PAGES = 8, 2, 128, 16
HALF = torch.bfloat16
LENGTHS = [130, 257, 5]


def random(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"])
def operators(npu, request) -> Operators:
    """The device refuses by itself whatever goes unchecked before it."""
    return Operators(is_checked=request.param)


class Scene:
    """Pages of three rows, on the device."""

    def __init__(self, on, dim: int) -> None:
        self.on, self.dim = on, dim
        self.k, self.v = random(PAGES, PAGE, KV_HEADS, dim), random(PAGES, PAGE, KV_HEADS, dim) * 2
        self.table = torch.zeros(3, 4, dtype=torch.int32)
        pages = iter(range(PAGES - 1, 0, -2))
        for row, length in enumerate(LENGTHS):
            for column in range(-(-length // PAGE)):
                self.table[row, column] = next(pages)
        self.pages = on(self.k).flatten(2), on(self.v).flatten(2)
        self.scale = 1 / math.sqrt(dim)

    def wanted(self, q: torch.Tensor, counts: list[int], window: int = 0) -> torch.Tensor:
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
        contexts = torch.tensor([n - c for n, c in zip(LENGTHS, counts, strict=True)])
        return reference.paged_attention(
            *(q.float(), self.k.float(), self.v.float(), self.table, starts, contexts),
            *(self.scale, window, 0.0),
        )

    def query(self) -> dict[str, torch.Tensor]:
        """A single token of each row, and where its pages are."""
        query = random(3, 1, HEADS, self.dim)
        return {"query": self.on(query), "table": self.on(self.table)}

    def single(self, operators: Operators, **changed) -> torch.Tensor:
        given = {
            **({} if {"query", "table"} <= changed.keys() else self.query()),
            **dict(zip(("key", "value"), self.pages, strict=True)),
            "lengths": LENGTHS,
            "kv_heads": KV_HEADS,
            "scale": self.scale,
        }
        return operators.attend_single(**given | changed)

    def together(self, operators: Operators, **changed) -> torch.Tensor:
        given = {
            "query": self.on(random(45, HEADS, self.dim)),
            **dict(zip(("key", "value"), self.pages, strict=True)),
            "table": self.on(self.table),
            "ends": [10, 40, 45],
            "lengths": LENGTHS,
            "kv_heads": KV_HEADS,
            "scale": self.scale,
            "window": 0,
        }
        return operators.attend_together(**given | changed)


@pytest.fixture
def scene(npu, on) -> Scene:
    return Scene(on, 64)


@pytest.fixture
def wide(npu, on) -> Scene:
    return Scene(on, 128)


class TestNumbers:
    def test_rms_norm(self, operators, on):
        x, weight = random(5, 32), random(32)
        got = operators.rms_norm(on(x), on(weight), 1e-5).cpu()
        torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-5), atol=0.02, rtol=0.02)

    def test_add_rms_norm(self, operators, on):
        x, residual, weight = random(5, 32), random(32, 5).t().contiguous(), random(32)
        normed, total = operators.add_rms_norm(on(x), on(residual), on(weight), 1e-5)
        assert torch.equal(total.cpu(), x + residual)
        wanted = reference.rms_norm(x + residual, weight, 1e-5)
        torch.testing.assert_close(normed.cpu(), wanted, atol=0.02, rtol=0.02)

    def test_swiglu_takes_the_gate_first(self, operators, on):
        x = random(5, 32)
        got = operators.swiglu(on(x)).cpu()
        torch.testing.assert_close(got, reference.silu_and_mul(x), atol=0.02, rtol=0.02)

    def test_rotary_mul(self, operators, on):
        q, angles = random(5, 4, 16, dtype=torch.float32), random(5, 8, dtype=torch.float32)
        both = torch.cat([angles, angles], -1)[None, :, None]
        got = operators.rotary_mul(on(q[None]), on(both.cos()), on(both.sin())).cpu()[0]
        wanted, _ = reference.rotary(q, q, angles.cos(), angles.sin())
        torch.testing.assert_close(got, wanted)

    def test_scatter(self, operators, on):
        pages, places = on(torch.zeros(6, 4)), torch.tensor([[4], [1]])
        operators.scatter(pages, on(places), on(torch.tensor([[1.0] * 4, [2.0] * 4])))
        assert pages.cpu()[:, 0].tolist() == [0, 2, 0, 0, 1, 0]

    def test_single_tokens(self, operators, scene):
        got = scene.single(operators).cpu()[:, 0]
        wanted = scene.wanted(random(3, 1, HEADS, 64)[:, 0], [1, 1, 1])
        torch.testing.assert_close(got.float(), wanted, atol=0.02, rtol=0.02)

    @pytest.mark.parametrize("window", [0, 20])
    def test_rows_together(self, operators, wide, window):
        got = wide.together(operators, window=window).cpu()
        wanted = wide.wanted(random(45, HEADS, 128), [10, 30, 5], window)
        torch.testing.assert_close(got.float(), wanted, atol=0.02, rtol=0.02)

    @pytest.mark.parametrize("window", [0, 20])
    def test_one_row(self, operators, scene, window):
        q = random(1, 30, HEADS, 64)
        got = operators.attend_rows(
            *(scene.on(q), *scene.pages, scene.on(scene.table[1:2]), LENGTHS[1:2], KV_HEADS),
            *(scene.scale, window),
        )
        padded = torch.cat([q[0, :1], q[0], q[0, :1]])
        wanted = scene.wanted(padded, [1, 30, 1], window)[1:31]
        torch.testing.assert_close(got.cpu()[0].float(), wanted, atol=0.02, rtol=0.02)


class TestRefusals:
    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            ({"query": lambda s: s.on(random(3, 1, HEADS, 64).float())}, "must be torch.bfloat16"),
            ({"query": lambda s: s.on(random(3, 1, HEADS, 64).half())}, "must have one dtype"),
            ({"query": lambda s: random(3, 1, HEADS, 64)}, "query must lie on the NPU"),
            ({"query": lambda s: s.on(random(3, HEADS, 64))}, "has 4 dimensions"),
            ({"table": lambda s: s.on(s.table.long())}, "block_table must be torch.int32"),
            ({"table": lambda s: s.table}, "block_table must lie on the NPU"),
            ({"table": lambda s: s.on(s.table[:2])}, r"block_table must be \[3"),
            ({"table": lambda s: s.on(s.table)[:, :3]}, "block_table must be contiguous"),
            ({"table": lambda s: s.on(s.table)[:, :2].contiguous()}, "must have 3 columns for 257"),
            ({"table": lambda s: s.on(s.table + 99)}, "the pages of row 0 must be 0 to 15"),
            ({"lengths": lambda s: [1, 2]}, "must be 3 numbers"),
            ({"lengths": lambda s: []}, "needs actual_seq_lengths_kv"),
            ({"lengths": lambda s: [1, 2, -1]}, "from 0 on"),
            ({"kv_heads": lambda s: 3}, "times the kv heads, they are 8 and 3"),
            ({"kv_heads": lambda s: 4}, "pages must be"),
            ({"key": lambda s: s.pages[0].view(PAGES, PAGE, KV_HEADS, 64)}, "pages must be"),
            ({"value": lambda s: s.pages[1][1:]}, "as many pages"),
        ],
    )
    def test_attention_of_single_tokens(self, operators, scene, changed, why):
        made = {name: make(scene) for name, make in changed.items()}
        with pytest.raises(ContractError, match=why):
            scene.single(operators, **made)

    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            ({"ends": lambda s: [10, 30, 5]}, "are sums, rising to the number of tokens 45"),
            ({"ends": lambda s: [10, 40, 44]}, "are sums, rising to the number of tokens 45"),
            ({"ends": lambda s: []}, "TND needs actual_seq_lengths"),
            (
                {
                    "key": lambda s: s.pages[0].view(2 * PAGES, 64, -1),
                    "value": lambda s: s.pages[1].view(2 * PAGES, 64, -1),
                },
                "must be a multiple of 128",
            ),
        ],
    )
    def test_attention_of_rows_together(self, operators, wide, changed, why):
        made = {name: make(wide) for name, make in changed.items()}
        with pytest.raises(ContractError, match=why):
            wide.together(operators, **made)

    def test_heads_that_rows_together_do_not_take(self, operators, scene):
        with pytest.raises(ContractError, match="needs heads of 128 or 192 or 256 dimensions"):
            scene.together(operators)

    def test_heads_that_are_no_multiple_of_16(self, operators, on):
        with pytest.raises(ContractError, match="a multiple of 16 and at most 512"):
            Scene(on, 24).single(operators)

    @pytest.mark.parametrize(
        ("mask", "why"),
        [
            (None, "needs the mask of 2048 x 2048"),
            (torch.ones(128, 128, dtype=torch.bool).triu(1), "needs the mask of 2048 x 2048"),
            (torch.ones(2048, 2048, dtype=torch.bool).tril(), "must be 1 above the diagonal only"),
            (torch.ones(2048, 2048).triu(1), "atten_mask must be"),
        ],
        ids=["none", "small", "inverted", "floats"],
    )
    def test_masks(self, npu, wide, mask, why):
        with pytest.raises(ContractError, match=why):
            torch.ops.npu.npu_fused_infer_attention_score(
                *(wide.on(random(45, HEADS, 128)), *wide.pages),
                atten_mask=None if mask is None else wide.on(mask),
                actual_seq_lengths=[10, 40, 45],
                actual_seq_lengths_kv=LENGTHS,
                block_table=wide.on(wide.table),
                num_heads=HEADS,
                num_key_value_heads=KV_HEADS,
                input_layout="TND",
                sparse_mode=3,
                block_size=PAGE,
            )

    def test_arguments_that_do_not_exist_and_those_that_are_not_emulated(self, npu, scene):
        q = scene.on(random(3, 1, HEADS, 64))
        attend = torch.ops.npu.npu_fused_infer_attention_score
        with pytest.raises(RuntimeError, match="num_head"):
            attend(q, *scene.pages, num_head=8)
        with pytest.raises(ContractError, match="antiquant_mode are not served here"):
            attend(q, *scene.pages, antiquant_mode=1)

    @pytest.mark.parametrize(
        ("x", "weight", "why"),
        [
            (random(5, 32), random(16), r"gamma must be \[32\]"),
            (random(5, 32), random(32).float(), "must have one dtype"),
            (random(5, 32).double(), random(32).double(), ""),
            (random(5, 32).int(), random(32).int(), "must be torch.bfloat16"),
        ],
    )
    def test_norms(self, operators, on, x, weight, why):
        if not why:  # doubles have become floats on their way
            assert operators.rms_norm(on(x), on(weight), 1e-5).dtype == torch.float32
            return
        with pytest.raises(ContractError, match=why):
            operators.rms_norm(on(x), on(weight), 1e-5)
        with pytest.raises(ContractError, match=why):
            operators.add_rms_norm(on(x), on(x), on(weight), 1e-5)

    def test_norms_of_parts_of_wider_rows(self, operators, on):
        with pytest.raises(ContractError, match="x must be contiguous"):
            operators.rms_norm(on(random(5, 64))[:, :32], on(random(32)), 1e-5)

    def test_sums_of_different_shapes(self, operators, on):
        with pytest.raises(ContractError, match="must have one shape"):
            operators.add_rms_norm(on(random(5, 32)), on(random(1, 32)), on(random(32)), 1e-5)

    def test_gates_of_odd_width(self, operators, on):
        with pytest.raises(ContractError, match="must be even, it is 33"):
            operators.swiglu(on(random(5, 33)))

    @pytest.mark.parametrize(
        ("x", "angles", "why"),
        [
            (random(1, 5, 4, 16), random(5, 16), "must have 4 dimensions"),
            (random(1, 5, 4, 15), random(1, 5, 1, 15), "must be even and less than 896"),
            (random(1, 5, 1000, 16), random(1, 5, 1, 16), "must be less than 1000"),
            (random(1, 5, 4, 16), random(1, 5, 1, 8), r"r1 and r2 must be \[1, 5, 1, 16\]"),
            (random(1, 5, 4, 16), random(1, 5, 1, 16).float(), "must have one dtype"),
        ],
    )
    def test_rotations(self, operators, on, x, angles, why):
        with pytest.raises(ContractError, match=why):
            operators.rotary_mul(on(x), on(angles), on(angles))

    @pytest.mark.parametrize(
        ("places", "updates", "why"),
        [
            (torch.tensor([[9]]), random(1, 4), "indices must be 0 to 5, they are 9 to 9"),
            (torch.tensor([[-1]]), random(1, 4), "indices must be 0 to 5"),
            (torch.tensor([1]), random(4), "indices must have 2 dimensions or more"),
            (torch.tensor([[1.0]]), random(1, 4), "indices must be torch.int32"),
            (torch.tensor([[1]]), random(1, 3), r"updates must be \[1, 4\]"),
            (torch.tensor([[1]]), random(1, 4).half(), "must have the dtype of self"),
        ],
    )
    def test_scattering(self, operators, on, places, updates, why):
        with pytest.raises(ContractError, match=why):
            operators.scatter(on(random(6, 4)), on(places), on(updates))


class TestLengthsOfGraphs:
    def capture(self, operators, scene):
        given, graph = scene.query(), torch.npu.NPUGraph()
        with torch.npu.graph(graph, auto_dispatch_capture=True):
            out = scene.single(operators, **given, lengths=[1, 1, 1])
        return graph, out

    def test_a_replay_computes_with_the_lengths_it_is_told(self, operators, scene):
        graph, out = self.capture(operators, scene)
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": LENGTHS}])
        graph.replay()
        assert torch.equal(out.cpu(), scene.single(operators).cpu())

    def test_a_replay_with_the_lengths_of_before_is_caught(self, operators, scene):
        graph, _ = self.capture(operators, scene)
        with pytest.raises(ContractError, match="with the lengths of its last run"):
            graph.replay()
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": LENGTHS}])
        graph.replay()
        with pytest.raises(ContractError, match="with the lengths of its last run"):
            graph.replay()

    def test_a_graph_that_takes_no_updates_says_so(self, operators, scene):
        given, graph = scene.query(), torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            scene.single(operators, **given)
        with pytest.raises(ContractError, match="auto_dispatch_capture"):
            graph.update(cpu_update_input=[{"actual_seq_lengths_kv": LENGTHS}])
