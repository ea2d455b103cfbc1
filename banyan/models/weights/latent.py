"""Latent attention as newer GGUF files keep it: the matrix that expands latents to keys and values
in two tensors, each head's keys transposed.

    attn_k_b [heads, rank, plain_dim], attn_v_b [heads, value_dim, rank]

Together they are attn_kv_b [heads · (plain_dim + value_dim), rank], as older files have it.
"""

from collections.abc import Iterator

import torch

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.models.weights.quant.base import Stored
from banyan.ops.stored import StoredWeight

_KEYS, _VALUES, _WHOLE = ".attn_k_b.weight", ".attn_v_b.weight", ".attn_kv_b.weight"


def with_whole_expansions(tensors: Iterator[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    """The tensors with each pair as one; ModelError when halves are missing or do not match."""
    waiting: dict[str, dict[str, StoredWeight]] = {}
    for name, tensor in tensors:
        last = next((last for last in (_KEYS, _VALUES) if name.endswith(last)), "")
        if not last or not isinstance(tensor, StoredWeight):
            yield name, tensor
            continue
        block = name.removesuffix(last)
        halves = waiting.setdefault(block, {})
        halves[last] = tensor
        if len(halves) == 2:
            del waiting[block]
            yield block + _WHOLE, joined_expansion(block, halves[_KEYS], halves[_VALUES])
    if waiting:
        block, halves = next(iter(waiting.items()))
        raise ModelError(
            f"{len(waiting)} layers have half of an expansion: {printable(block)} has "
            f"{printable(', '.join(halves))} alone",
            hint="a file of the model is missing, or damaged",
        )


def half_of_expansion(name: str) -> tuple[int, str, str]:
    """Which half a tensor is (1, 2; 0 = none), and what the other one and the whole are called."""
    for half, (last, other) in enumerate(((_KEYS, _VALUES), (_VALUES, _KEYS)), 1):
        if name.endswith(last):
            block = name.removesuffix(last)
            return half, block + other, block + _WHOLE
    return 0, "", ""


def joined_expansion(block: str, keys: StoredWeight, values: StoredWeight) -> StoredWeight:
    has_heads = len(keys.shape) == len(values.shape) == 3 and keys.shape[0] == values.shape[0]
    if not has_heads or keys.shape[1] != values.shape[2]:
        raise ModelError(
            f"{printable(block)}: attn_k_b has shape {list(keys.shape)} and attn_v_b "
            f"{list(values.shape)}, not [heads, rank, plain] and [heads, value, rank]"
        )
    heads = torch.cat([keys.dense.float().transpose(1, 2), values.dense.float()], dim=1)
    return StoredWeight.from_tensor(heads.flatten(0, 1))
