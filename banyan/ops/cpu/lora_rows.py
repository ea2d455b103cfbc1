"""The compiled op of adapters that change whole rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.cpu.library import Library
from banyan.ops.lora import AdapterTokens
from banyan.ops.lora_rows import RowTable


def _make(library: Library) -> Callable[..., object]:
    def adapt_rows(out: Tensor, x: Tensor, table: RowTable, tokens: AdapterTokens) -> None:
        assert out.dtype == torch.float32 and out.stride(1) == 1
        assert x.dtype == (torch.int64 if x.dim() == 1 else torch.float32) and x.stride(-1) == 1
        library.call(
            "bn_adapter_rows",
            out.shape[0],
            *(table.entries.data_ptr(), tokens.pieces.data_ptr(), tokens.order.data_ptr()),
            *(x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0)),
            *(x.shape[-1], out.shape[1]),
        )

    return adapt_rows


def _supports(spec: OpSpec) -> str | None:
    if spec.toolkit.absence:
        return spec.toolkit.absence
    return (
        None if spec.dtype == torch.float32 else f"computes in fp32, activations are {spec.dtype}"
    )


adapt_rows = Kernel(supports=_supports, make=_make)
