"""Compiled LoRA ops: matrices in their file's type, sums in fp32."""

from collections.abc import Callable

import torch
from torch import Tensor

from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.cpu.library import Library
from banyan.ops.lora import AdapterTable, AdapterTokens, RowTable


def make_adapt(library: Library) -> Callable[..., object]:
    def adapt(out: Tensor, x: Tensor, table: AdapterTable, tokens: AdapterTokens) -> None:
        assert x.dtype == out.dtype == torch.float32 and x.stride(1) == out.stride(1) == 1
        library.call(
            "bn_lora",
            x.shape[0],
            table.entries.data_ptr(),
            tokens.pieces.data_ptr(),
            tokens.order.data_ptr(),
            tokens.numbers.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            tokens.inner(table.width).ctypes.data,
            table.progress.data_ptr(),
            table.inputs,
            out.shape[1],
            table.width,
        )

    return adapt


def _supports(spec: OpSpec) -> str | None:
    if spec.toolkit.absence:
        return spec.toolkit.absence
    return (
        None if spec.dtype == torch.float32 else f"computes in fp32, activations are {spec.dtype}"
    )


adapt = Kernel(supports=_supports, make=make_adapt)


def _make_adapt_rows(library: Library) -> Callable[..., object]:
    def adapt_rows(out: Tensor, x: Tensor, table: RowTable, tokens: AdapterTokens) -> None:
        assert out.dtype == torch.float32 and out.stride(1) == 1
        assert x.dtype == (torch.int64 if x.dim() == 1 else torch.float32) and x.stride(-1) == 1
        library.call(
            "bn_lora_rows",
            out.shape[0],
            table.entries.data_ptr(),
            tokens.pieces.data_ptr(),
            tokens.order.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            x.shape[-1],
            out.shape[1],
        )

    return adapt_rows


adapt_rows = Kernel(supports=_supports, make=_make_adapt_rows)
