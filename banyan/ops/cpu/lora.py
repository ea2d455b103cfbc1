"""The compiled op of low-rank adapters: matrices in the type of their file, sums in fp32."""

from collections.abc import Callable

import torch
from torch import Tensor

from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.cpu.library import Library
from banyan.ops.lora import AdapterTable, AdapterTokens


def make(library: Library) -> Callable[..., object]:
    def adapt(out: Tensor, x: Tensor, table: AdapterTable, tokens: AdapterTokens) -> None:
        assert x.dtype == out.dtype == torch.float32 and x.stride(1) == out.stride(1) == 1
        library.call(
            "bn_adapters",
            x.shape[0],
            table.entries.data_ptr(),
            *(tokens.pieces.data_ptr(), tokens.order.data_ptr(), tokens.numbers.data_ptr()),
            *(x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0)),
            *(tokens.inner(table.width).ctypes.data, table.progress.data_ptr()),
            *(table.inputs, out.shape[1], table.width),
        )

    return adapt


def _supports(spec: OpSpec) -> str | None:
    if spec.toolkit.absence:
        return spec.toolkit.absence
    return (
        None if spec.dtype == torch.float32 else f"computes in fp32, activations are {spec.dtype}"
    )


adapt = Kernel(supports=_supports, make=make)
