"""LoRA in Triton, from the stacks of `ops/lora.py`: the A and B products of each token's adapter.

The time grows with the adapters in the step, not with the loaded ones. Nothing waits for the
device, and launches depend only on the number of tokens, so steps can be captured.
"""

import torch
from torch import Tensor

from banyan.ops.bind import Kernel
from banyan.ops.cuda.needs import LEAST_BLOCK, declines, power_of_two
from banyan.ops.lora import MAX_PARTS, AdapterTable, AdapterTokens

_ROWS = LEAST_BLOCK
"""Tokens of a program; constant, so that sums have one order."""
_MOST_RANKS, _COLUMNS, _STEP = 64, 128, 128
_CUT = 512
"""Inputs of a program; several programs share one row's product."""


def _adapt(out: Tensor, x: Tensor, table: AdapterTable, tokens: AdapterTokens) -> None:
    from banyan.ops.cuda.lora_kernels import go_down, go_up

    stack, others = table.stack, tokens.others
    assert stack is not None and others is not None
    if not len(x):
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    assert out.stride(1) == 1, f"{out.stride()}"
    (parts, capacity, rank), inputs = stack.shape, x.shape[1]
    blocks, cuts = -(-len(x) // _ROWS), -(-inputs // _CUT)
    ranks = min(_MOST_RANKS, power_of_two(rank, LEAST_BLOCK))
    inner = torch.empty((cuts, len(x), parts * rank), dtype=torch.float32, device=x.device)
    sizes = {"CAPACITY": power_of_two(capacity), "ROWS": _ROWS, "RANKS": ranks}
    go_down[(blocks, parts * -(-rank // ranks), cuts)](
        x,
        stack.down,
        others,
        inner,
        len(x),
        inputs,
        x.stride(0),
        capacity,
        rank,
        parts,
        **sizes,
        CUT=_CUT,
        STEP=_STEP,
        num_warps=4,
    )
    tiles = sum(-(-size // _COLUMNS) for size in stack.outputs)
    go_up[(blocks, tiles)](
        inner,
        stack.up,
        others,
        out,
        len(x),
        out.stride(0),
        capacity,
        rank,
        parts,
        cuts,
        *stack.outputs,
        *[0] * (MAX_PARTS - parts),
        **sizes,
        COLUMNS=_COLUMNS,
        AT_ONCE=8,
        num_warps=4,
    )


adapt = Kernel(supports=declines, run=_adapt)
