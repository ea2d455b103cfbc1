"""Compiled projections on packed weights, and embedding lookup from the checkpoint's blocks.

fp32 in and out, weights in the checkpoint's types. `rounded` multiplies quantised weights with
activations rounded to 8 bits per block of 32 inputs; a few of the largest activations of each row
stay exact. On processors with bf16 products it multiplies bf16 weights with bf16 activations.
`plain` takes weights of every type and does not round activations. `onednn` packs a dense weight
once at load. In all three a row's result does not depend on the number of rows, bit for bit:
oneDNN's packed products sum in one order for any number of rows, plain matrix products do not.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.cpu.library import Library
from banyan.ops.cpu.weights import SOURCES, Arena, PackedWeight, pack, rounding_of
from banyan.ops.stored import StoredWeight


class RoundedLinear:
    """Products of rounded activations: int8 with quantised weights, or bf16 with bf16 weights.

    Integer products are exact per block; the unrounded activations of a row are added in fp32."""

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
    """Products of fp32 activations with weights converted to fp32, summed in input order."""

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
    """Pack a projection; float weights are rounded to a type of `weights.QUANTIZATIONS` ("" = not).

    The result rounds activations if its format has such products."""
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
    """Why packed weights cannot be used; None = they can."""
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


class OneDnnLinear:
    """A dense weight [out, in] in oneDNN's own layout."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")


def _supports_onednn(spec: OpSpec) -> str | None:
    if spec.device.type != "cpu":
        return f"tensors are on {spec.device.type}"
    if not torch.backends.mkldnn.is_available():
        return "this torch is built without oneDNN"
    if spec.dtype != torch.float32:
        return f"packs fp32, activations are {spec.dtype}"
    return None


def _pack_onednn(
    weight: StoredWeight, dtype: torch.dtype, device: torch.device, is_head: bool = False
) -> OneDnnLinear:
    return OneDnnLinear(weight.dense.to(device, dtype))


onednn = Kernel(run=_pack_onednn, supports=_supports_onednn)


class StoredEmbedding:
    """Rows first … last − 1 of a table [ids, dim], kept in its stored type."""

    def __init__(
        self, library: Library, weight: StoredWeight, first: int, last: int, scale: float
    ) -> None:
        raw = weight.raw[first:last]
        self._raw = raw if raw.stride(1) == 1 else raw.contiguous()
        self._library = library
        self._source = SOURCES.index(weight.type)
        self._dim = weight.shape[1]
        self._first = first
        self._scale = scale

    def __call__(self, tokens: Tensor) -> Tensor:
        assert tokens.dtype == torch.int64 and tokens.is_contiguous()
        out = self._library.empty((tokens.shape[0], self._dim))
        self._library.call(
            "bn_embedding_rows",
            tokens.shape[0],
            tokens.data_ptr(),
            self._source,
            self._raw.data_ptr(),
            self._raw.stride(0),
            self._raw.shape[0],
            self._dim,
            self._first,
            self._scale,
            out.data_ptr(),
            self._dim,
        )
        return out


def _embedding_packer(library: Library) -> Callable[..., object]:
    def packer(
        weight: StoredWeight,
        dtype: torch.dtype,
        device: torch.device,
        first: int,
        last: int,
        scale: float = 1.0,
    ) -> StoredEmbedding:
        return StoredEmbedding(library, weight, first, last, scale)

    return packer


embedding = Kernel(supports=supports, make=_embedding_packer)
