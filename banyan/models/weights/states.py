"""Tensors of layers that keep a state, as GGUF files have them: what is one number for each head or
channel is a matrix of one column, groups lie in rows, and rates of forgetting are whole and below
zero, where models take the logarithm of what is above.
"""

from collections.abc import Iterator

import torch

from banyan.model_config.model_config import StateFacts
from banyan.models.weights.quant.base import Stored
from banyan.ops.stored import RawTensor, StoredWeight

_RATE = ".ssm_a"
_FLAT = (".ssm_d", ".ssm_norm.weight")
_CONVOLUTIONS = (".ssm_conv1d.weight", ".shortconv.conv.weight")


def with_plain_states(
    tensors: Iterator[tuple[str, Stored]], facts: StateFacts
) -> Iterator[tuple[str, Stored]]:
    for name, tensor in tensors:
        if isinstance(tensor, RawTensor):
            yield name, tensor
        elif name.endswith(_RATE):
            logarithms = (-tensor.dense.float()).log()
            is_column = tensor.shape[-1] == 1
            rate = logarithms.flatten() if is_column else logarithms
            if facts.mixer == "delta by key":  # some files drop dimensions of one
                rate = rate.view(1, 1, -1, 1)
            yield name, StoredWeight.from_tensor(rate)
        elif name.endswith(_FLAT):
            yield name, StoredWeight.from_tensor(tensor.dense.flatten())
        elif name.endswith(_CONVOLUTIONS) and len(tensor.shape) == 2:
            yield name, StoredWeight.from_tensor(tensor.dense.unsqueeze(1))
        else:
            yield name, tensor


_QUERIES_FIRST = (".attn_qkv.weight", ".ssm_conv1d.weight")
_OF_HEADS = (".ssm_alpha.weight", ".ssm_beta.weight", ".ssm_a", ".ssm_dt.bias")


def with_heads_of_keys(
    tensors: Iterator[tuple[str, Stored]], facts: StateFacts
) -> Iterator[tuple[str, Stored]]:
    """Value heads that lie in turns, one of each key head after another, in the order of the key
    heads. Only rows are sorted, which no block spans; the gate and what reads the heads stay as
    they are (`StateFacts.is_tiled`)."""
    heads = torch.arange(facts.heads).view(-1, facts.key_heads).T.flatten()
    of_values = (heads[:, None] * facts.value_dim + torch.arange(facts.value_dim)).flatten()
    before = 2 * facts.key_heads * facts.key_dim
    whole = torch.cat([torch.arange(before), before + of_values])
    for name, tensor in tensors:
        order = whole if name.endswith(_QUERIES_FIRST) else heads
        if name.endswith(_QUERIES_FIRST + _OF_HEADS) and isinstance(tensor, StoredWeight):
            is_vector = len(tensor.shape) == 1
            sorted_vector = StoredWeight.from_tensor(tensor.dense[order]) if is_vector else None
            tensor = sorted_vector or tensor.rows(order)
        yield name, tensor
