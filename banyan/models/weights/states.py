"""Tensors of layers that keep a state, as GGUF files have them: what is one number for each head or
channel is a matrix of one column, groups lie in rows, and rates of forgetting are whole and below
zero, where models take the logarithm of what is above.
"""

from collections.abc import Iterator

from banyan.models.weights.quant.base import Stored
from banyan.ops.stored import RawTensor, StoredWeight

_RATE = ".ssm_a"
_FLAT = (".ssm_d", ".ssm_norm.weight")
_CONVOLUTIONS = (".ssm_conv1d.weight", ".shortconv.conv.weight")


def with_plain_states(tensors: Iterator[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    for name, tensor in tensors:
        if isinstance(tensor, RawTensor):
            yield name, tensor
        elif name.endswith(_RATE):
            logarithms = (-tensor.dense.float()).log()
            is_column = tensor.shape[-1] == 1
            rate = logarithms.flatten() if is_column else logarithms
            yield name, StoredWeight.from_tensor(rate)
        elif name.endswith(_FLAT):
            yield name, StoredWeight.from_tensor(tensor.dense.flatten())
        elif name.endswith(_CONVOLUTIONS) and len(tensor.shape) == 2:
            yield name, StoredWeight.from_tensor(tensor.dense.unsqueeze(1))
        else:
            yield name, tensor
