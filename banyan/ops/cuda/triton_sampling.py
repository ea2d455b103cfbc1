"""Sampling on CUDA devices: logit edits as torch ops, and a kernel that draws, one program per
row."""

import torch
from torch import Tensor

from banyan.ops.bind import Kernel
from banyan.ops.cuda.needs import declines_device
from banyan.ops.sampling import PARAMS, SampleRows
from banyan.ops.tensor_sampling import sampled_by

_TILE, _WARPS = 4096, 16
_WORD = 8


def _place(name: str) -> int:
    """Byte offset of a parameter of a slot."""
    return PARAMS.fields[name][1]  # type: ignore[index]


def _draw(logits: Tensor, best: Tensor, tokens: Tensor, rows: SampleRows) -> None:
    from banyan.ops.cuda.sampling_kernels import draw

    count, vocab = logits.shape
    is_filtered = bool(((rows.asked("top_k") > 0) | (rows.asked("top_p") < 1.0)).any())
    found = torch.empty((count, vocab if is_filtered else 0), device=logits.device)
    draw[(count,)](
        logits,
        best,
        rows.params.view(torch.int64),
        rows.params,
        rows.slots,
        rows.positions,
        tokens,
        found,
        vocab,
        logits.stride(0),
        found.stride(0),
        WORDS=PARAMS.itemsize // _WORD,
        TEMPERATURE=_place("temperature") // _WORD,
        TOP_K=_place("top_k") // _WORD,
        TOP_P=_place("top_p") // _WORD,
        MIN_P=_place("min_p") // _WORD,
        SEED=_place("seed") // _WORD,
        GREEDY=_place("greedy"),
        TILE=_TILE,
        num_warps=_WARPS,
        enable_fp_fusion=False,  # each rounding is one of the definition
    )


def _sample(logits: Tensor, rows: SampleRows) -> tuple[Tensor, Tensor]:
    return sampled_by(_draw, logits, rows)


sample = Kernel(supports=declines_device, run=_sample)
