"""Roofline: bounds and shares from made-up numbers."""

import pytest

from banyan.bench.roofline import (
    BF16,
    FP32,
    INT8,
    MachinePeaks,
    OpCost,
    bound,
    merged,
    op_rows,
    table,
    whole_step,
)
from banyan.formats.mapped import TensorInfo
from banyan.model_config.model_config import ModelConfig

MACHINE = MachinePeaks(
    cores=2, read_bytes_s=10e9, fp32_ops_s=100e9, int8_ops_s=400e9, bf16_ops_s=200e9
)
MODEL_CONFIG = ModelConfig(
    path="x", format="gguf", architecture="LlamaForCausalLM", model_type="llama", vocab_size=100,
    hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4,
    context_length=64, dtype="q4_0",
)  # fmt: skip


@pytest.mark.parametrize(
    ("cost", "seconds", "limit"),
    [
        (OpCost("gemv", 1.0, bytes=10e9, operations=20e9), 1.0, "memory"),
        (OpCost("gemm", 1.0, bytes=1e9, operations=50e9), 0.5, FP32),
        (OpCost("gemm", 1.0, bytes=1e9, operations=50e9, arithmetic=INT8), 0.125, INT8),
        (OpCost("gemm", 1.0, bytes=1e9, operations=50e9, arithmetic=BF16), 0.25, BF16),
    ],
)
def test_an_op_is_bound_by_the_slower_of_memory_and_arithmetic(
    cost: OpCost, seconds: float, limit: str
) -> None:
    assert bound(cost, MACHINE) == (pytest.approx(seconds), limit)


def test_an_unmeasured_int8_peak_leaves_the_memory_bound() -> None:
    machine = MachinePeaks(2, 10e9, 100e9, None)
    assert bound(OpCost("gemm", 1.0, 1e9, 9e15, INT8), machine) == (0.1, "memory")


def test_rows_show_shares_fractions_and_what_no_op_accounts_for() -> None:
    costs = [
        OpCost("norm", 0.001, bytes=1e6, operations=1e6),
        OpCost("linear", 0.006, bytes=30e6, operations=60e6),
    ]
    linear, norm, rest = op_rows(costs, 0.010, MACHINE)
    assert (linear.cost.name, norm.cost.name, rest.cost.name) == (
        "linear",
        "norm",
        "outside of ops",
    )
    assert linear.share == pytest.approx(0.6)
    assert linear.fraction == pytest.approx(0.5)
    assert rest.share == pytest.approx(0.3)
    assert sum(row.share for row in (linear, norm, rest)) == pytest.approx(1.0)


def test_the_table_names_every_op_and_sums_the_bounds() -> None:
    rows = op_rows([OpCost("linear", 0.006, 30e6, 60e6)], 0.008, MACHINE)
    text = table("decode", rows, 0.008)
    assert "decode: 8000 us" in text
    assert "linear" in text and "outside of ops" in text
    assert "the bounds together: 3000 us, 37.5% of the step" in text


def test_a_step_reads_every_weight_once_and_every_rows_cache() -> None:
    tensors = [
        TensorInfo("token_embd.weight", (100, 8), "Q8_0", 0, 850),
        TensorInfo("blk.0.ffn_up.weight", (16, 8), "Q4_0", 0, 72),
    ]
    cost = whole_step(
        MODEL_CONFIG, tensors, 0.1, rows=3, tokens=3, context=10, cache_bytes=4, arithmetic=INT8
    )
    assert cost.bytes == 850 + 72 + 3 * 10 * (2 * 2 * 1 * 4) * 4
    assert cost.operations == 2 * (128 * 3 + 800 * 3) + 4 * 2 * 2 * 4 * 10 * 3
    assert cost.arithmetic == INT8


def test_an_embedding_next_to_an_untied_output_is_not_read_through() -> None:
    tied = [TensorInfo("token_embd.weight", (100, 8), "F32", 0, 3200)]
    untied = [*tied, TensorInfo("output.weight", (100, 8), "F32", 0, 3200)]
    first = whole_step(MODEL_CONFIG, tied, 0.1, 1, 1, 0, 4)
    assert whole_step(MODEL_CONFIG, untied, 0.1, 1, 1, 0, 4) == first


def test_a_machine_says_what_was_not_measured() -> None:
    assert "int8 not measured" in str(MachinePeaks(2, 10e9, 100e9))
    assert "int8 400 GOP/s, bf16 200 GFLOP/s" in str(MACHINE)
    assert "bf16" not in str(MachinePeaks(2, 10e9, 100e9))
    assert MachinePeaks(2, 10e9, 100e9).keys()["int8_gop_s"] is None
    assert "core to core" not in str(MACHINE)
    assert "30 ns from core to core" in str(MachinePeaks(2, 10e9, 100e9, passing_s=30e-9))


def test_the_same_op_of_every_layer_is_one_row() -> None:
    stages = [
        OpCost("linear", 0.002, 10.0, 100.0),
        OpCost("norm", 0.001, 1.0, 2.0),
        OpCost("linear", 0.003, 20.0, 200.0),
        OpCost("linear_bf16 + adapters", 0.001, 1.0, 2.0),
    ]
    linear, norm, pairs = merged(stages)
    assert pairs.arithmetic == BF16
    assert linear == OpCost("linear × 2", pytest.approx(0.005), 30.0, 300.0, INT8)
    assert norm == OpCost("norm", 0.001, 1.0, 2.0, FP32)
