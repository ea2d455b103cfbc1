"""Compiled projections on packed weights: fp32 in and out, weights as the checkpoint has them.

`rounded` multiplies quantised weights with activations that are rounded to 8 bits per block of 32
inputs, a few of the largest of each row excepted, and weights in bf16 with activations in bf16
where the processor does that; `plain` takes weights of every type and leaves the activations as
they are. In both a row's result is the same bits however many rows there are.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.cpu.library import Library
from banyan.ops.cpu.weights import SOURCES, Arena, PackedWeight, pack, rounding_of
from banyan.ops.stored import StoredWeight


class RoundedLinear:
    """Products of 8-bit activations with quantised weights, exact in integers per block, what is
    kept apart of a row added in fp32; or of activations in bf16 with weights in bf16."""

    def __init__(self, library: Library, weight: PackedWeight) -> None:
        self.weight = weight
        self._library = library
        self._row_bytes = library.function("bn_quantize_bytes")(weight.format, weight.inputs)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, tokens = self.weight, x.shape[0]
        _check(x, weight)
        quantized = self._library.empty((tokens, self._row_bytes), torch.uint8)
        out = self._library.empty((tokens, weight.outputs))
        self._library.call(
            "bn_quantize",
            tokens,
            weight.format,
            x.data_ptr(),
            x.stride(0),
            weight.inputs,
            quantized.data_ptr(),
        )
        self._library.call(
            "bn_linear",
            tokens,
            *_arguments(weight, bias),
            quantized.data_ptr(),
            out.data_ptr(),
            weight.outputs,
        )
        return out


class PlainLinear:
    """Products of fp32 activations with weights brought to fp32, added in the inputs' order."""

    def __init__(self, library: Library, weight: PackedWeight) -> None:
        self.weight = weight
        self._library = library

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, tokens = self.weight, x.shape[0]
        _check(x, weight)
        out = self._library.empty((tokens, weight.outputs))
        self._library.call(
            "bn_linear_exact",
            tokens,
            *_arguments(weight, bias),
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            weight.outputs,
        )
        return out


def pack_linear(
    library: Library, weight: StoredWeight, quantization: str = "", arena: Arena | None = None
) -> RoundedLinear | PlainLinear:
    """A projection whose float weights are rounded to a type of `weights.QUANTIZATIONS` at load
    ("" = kept as they are). It rounds activations where that can be."""
    packed = pack(library, arena or Arena(), weight, quantization, rounds=True)
    rounds = rounding_of(library, weight.type, quantization)
    return (RoundedLinear if rounds else PlainLinear)(library, packed)


def _check(x: Tensor, weight: PackedWeight) -> None:
    assert x.dtype == torch.float32 and x.shape[1] == weight.inputs and x.stride(1) == 1, (
        f"expected rows of {weight.inputs} fp32, got {list(x.shape)} {x.dtype} {x.stride()}"
    )


def _arguments(weight: PackedWeight, bias: Tensor | None) -> tuple[int, ...]:
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous())
    return (
        weight.format,
        weight.outputs,
        weight.inputs,
        weight.tiles.data_ptr(),
        weight.factors.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )


def supports(spec: OpSpec) -> str | None:
    """Why packed weights cannot be used; None when they can."""
    if spec.toolkit.absence:
        return spec.toolkit.absence
    if spec.dtype != torch.float32:
        return f"computes in fp32, activations are {spec.dtype}"
    return None if spec.weight_type in SOURCES else f"does not read {spec.weight_type}"


def _supports_rounded(spec: OpSpec) -> str | None:
    reason = supports(spec)
    if reason is not None:
        return reason
    assert isinstance(spec.toolkit, Library)
    if rounding_of(spec.toolkit, spec.weight_type, spec.toolkit.quantization):
        return None
    return "for quantised weights, and bf16 where the processor multiplies that"


def _packer(
    kind: type[RoundedLinear] | type[PlainLinear],
) -> Callable[[Library], Callable[..., object]]:
    def make(library: Library) -> Callable[..., object]:
        arena = Arena()

        def packer(
            weight: StoredWeight, dtype: torch.dtype, device: torch.device, is_head: bool = False
        ) -> object:
            rounds = kind is RoundedLinear
            packed = pack(library, arena, weight, library.quantization, is_head, rounds)
            return kind(library, packed)

        return packer

    return make


rounded = Kernel(supports=_supports_rounded, make=_packer(RoundedLinear), rounds_activations=True)
plain = Kernel(supports=supports, make=_packer(PlainLinear))
