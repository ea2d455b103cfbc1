"""--torchao-config: float weights of projections are rounded while they are loaded, as torchao's
configurations of that name do, and kept in the storage type that holds just these numbers.

    int8wo, int8dq              integers around zero, a scale per output           Q8_0
    int4wo-GROUP                0…15 from a minimum, a scale per group of inputs   Q4_1
    fp8wo, fp8dq-per_row        e4m3, a scale per output                           E4M3
    fp8dq-per_tensor            e4m3, one scale                                    E4M3

What E4M3 cannot hold (`quant/fp8.py`) becomes BF16.

Source: the quantization primitives and configurations of github.com/pytorch/ao.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from banyan.base.log import logger
from banyan.families import FAMILIES
from banyan.model_config.model_config import ModelConfig
from banyan.models.weights.names import is_projection
from banyan.models.weights.quant.base import Stored
from banyan.models.weights.quant.fp8 import Fp8
from banyan.models.weights.quant.groups import from_groups, per_block
from banyan.models.weights.reader import Tensors, Transform
from banyan.ops import blocks
from banyan.ops.rounding import FP8_MOST
from banyan.ops.stored import STORAGE_TYPES, RawTensor, StoredWeight

log = logger(__name__)

_TINY = 2.0**-24
"""The least fp16 number above zero: scales are kept in fp16."""
_BY_ACTIVATIONS = "activations are rounded as the kernels of this device do, not as it asks"

_BY_SHAPE = Fp8(None)

Round = Callable[[Tensor], StoredWeight | None]
"""[out, in] fp32 -> the rounded weight, None when it does not fit."""


def _eight_bits(values: Tensor) -> StoredWeight:
    scale = (values.abs().amax(1, keepdim=True) / 127.5).clamp(min=_TINY).half()
    levels = (values / scale.float()).round_().clamp_(-128, 127).to(torch.int8)
    return from_groups(levels, 0, scale, values.shape[1]).weight


def _four_bits(values: Tensor, group: int) -> StoredWeight | None:
    outputs, inputs = values.shape
    if inputs % group:
        return None
    pieces = values.view(outputs, -1, group)
    low = pieces.amin(2).half()
    scale = ((pieces.amax(2) - low.float()) / 15).clamp(min=_TINY).half()
    levels = (pieces - low.float().unsqueeze(2)) / scale.float().unsqueeze(2)
    levels = levels.round_().clamp_(0, 15).byte().view(outputs, inputs)
    return per_block("Q4_1", blocks.lay_q4_1, levels, (scale, low), group).weight


def _floats(values: Tensor, largest: Tensor) -> StoredWeight:
    scale = (largest / FP8_MOST).clamp(min=_TINY)
    numbers = (values / scale).clamp_(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)
    return _BY_SHAPE.of_numbers(numbers, scale).weight


def _floats_by_row(values: Tensor) -> StoredWeight:
    return _floats(values, values.abs().amax(1, keepdim=True))


def _floats_by_tensor(values: Tensor) -> StoredWeight:
    return _floats(values, values.abs().max())


def _round_of(name: str) -> Round:
    """Args: name: of TORCHAO_NAMES."""
    kind, _, group = name.partition("-")
    if kind == "int4wo":
        return lambda values: _four_bits(values, int(group))
    if name == "fp8dq-per_tensor":
        return _floats_by_tensor
    return _eight_bits if kind.startswith("int8") else _floats_by_row


def torchao_transform(name: str, model_config: ModelConfig) -> Transform:
    """Quantises a checkpoint's tensors while they are loaded."""
    round, names = (
        _round_of(name),
        FAMILIES.load(model_config.architecture).names[model_config.format],
    )

    def rounded(tensors: Tensors) -> Iterator[tuple[str, Stored]]:
        types = Counter[str]()
        for label, tensor in tensors:
            if isinstance(tensor, RawTensor) or not STORAGE_TYPES[tensor.type].is_float:
                yield label, tensor
                continue
            if not is_projection(label, tensor.shape, names, model_config.num_layers):
                yield label, tensor
                continue
            found = _by_row(tensor, round)
            types[found.type if found is not None else "floats, whose inputs no group divides"] += 1
            yield label, tensor if found is None else found
        summary = ", ".join(f"{count} as {type}" for type, count in sorted(types.items()))
        log.info("rounded weights: torchao=%s, %s", name, summary or "none")
        if "dq" in name:
            log.warning("--torchao-config %s: %s", name, _BY_ACTIVATIONS)

    return rounded


def _by_row(weight: StoredWeight, round: Round) -> StoredWeight | None:
    """Quantise a weight, or each expert of a stack; a scale per tensor is then a scale per
    expert."""
    if len(weight.shape) == 2:
        return round(weight.dense.float())
    experts = [_by_row(weight.at(index), round) for index in range(weight.shape[0])]
    found = [expert for expert in experts if expert is not None]
    if len(found) != len(experts):
        return None
    raw = torch.stack([expert.raw for expert in found])
    return StoredWeight(found[0].type, weight.shape, raw)
