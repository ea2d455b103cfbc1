"""The NPU's operators: their numbers against plain torch, and what the emulated device refuses
beyond their contracts (test_refusals.py), because a real one would follow it without a word."""

import pytest
import torch

from banyan.ascend.ops.contracts import ContractError
from banyan.ascend.ops.operators import Operators
from banyan.ops import reference
from tests.support.emulated_pages import HEADS, KV_HEADS, LENGTHS, PAGE, Scene, random


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"])
def operators(npu, request) -> Operators:
    """The device refuses by itself whatever goes unchecked before it."""
    return Operators(is_checked=request.param)


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
        got = operators.attention.attend_rows(
            *(scene.on(q), *scene.pages, scene.on(scene.table[1:2]), LENGTHS[1:2], KV_HEADS),
            *(scene.scale, window),
        )
        padded = torch.cat([q[0, :1], q[0], q[0, :1]])
        wanted = scene.wanted(padded, [1, 30, 1], window)[1:31]
        torch.testing.assert_close(got.cpu()[0].float(), wanted, atol=0.02, rtol=0.02)


class TestRefusals:
    def test_pages_that_are_not_there(self, operators, scene):
        with pytest.raises(ContractError, match="the pages of row 0 must be 0 to 15"):
            scene.single(operators, table=scene.on(scene.table + 99))

    def test_a_mask_of_the_other_half(self, npu, wide):
        mask = torch.ones(2048, 2048, dtype=torch.bool).tril()
        with pytest.raises(ContractError, match="must be 1 above the diagonal only"):
            torch.ops.npu.npu_fused_infer_attention_score(
                *(wide.on(random(45, HEADS, 128)), *wide.pages),
                atten_mask=wide.on(mask),
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

    def test_doubles_have_become_floats_on_their_way(self, operators, on):
        x, weight = on(random(5, 32).double()), on(random(32).double())
        assert operators.rms_norm(x, weight, 1e-5).dtype == torch.float32

    @pytest.mark.parametrize("place", [9, -1])
    def test_places_that_are_not_there(self, operators, on, place):
        with pytest.raises(ContractError, match="indices must be 0 to 5"):
            operators.scatter(on(random(6, 4)), on(torch.tensor([[place]])), on(random(1, 4)))


class TestLengthsOfGraphs:
    def capture(self, operators, scene):
        given, graph = scene.query(), torch.npu.NPUGraph()
        with torch.npu.graph(graph, auto_dispatch_capture=True):
            out = scene.single(operators, **given, lengths=[1, 1, 1])
        return graph, out

    def test_a_replay_computes_with_the_lengths_it_is_given(self, operators, scene):
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
