"""Rewrites checkpoint layouts that differ from the model's layers, while tensors are read:

gpt-oss's stacks of experts, whose gate and up outputs alternate:

    …experts.gate_up_proj [experts, dim, 2 · inner], …gate_up_proj_bias [experts, 2 · inner]
    …experts.down_proj [experts, inner, dim], …down_proj_bias [experts, dim]

(quantised weights have their outputs first, as "….weight"; the results are gate, up and down with
outputs first, "….weight" and "….bias"); split latent expansions of newer GGUF files, with each
head's keys transposed:

    attn_k_b [heads, rank, plain_dim], attn_v_b [heads, value_dim, rank]
    -> attn_kv_b [heads · (plain_dim + value_dim), rank]

state layers of GGUF files; the shared blocks of Zamba2; transposed matrices of GPT-2; and
projections of q, k and v whose rows are ordered by KV head.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.families.names import NameMap
from banyan.model_config.model_config import ModelConfig, StateFacts
from banyan.models.weights.names import split_numbers
from banyan.models.weights.quant.base import Stored
from banyan.ops.stored import RawTensor, StoredWeight

_EXPERTS, _PAIR, _DOWN = ".mlp.experts.", "gate_up_proj", "down_proj"
_GATE_AND_UP = ("gate_proj", "up_proj")


def with_plain_experts(tensors: Iterator[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    """Raises:
    ModelError: a stack with wrong dimensions.
    """
    for name, tensor in tensors:
        block, stem, last = name.rpartition(_EXPERTS)
        kind = last.removesuffix("_bias").removesuffix(".weight")
        if not stem or kind not in (_PAIR, _DOWN) or isinstance(tensor, RawTensor):
            yield name, tensor
            continue
        is_bias = last.endswith("_bias")
        dims, pairs = len(tensor.shape), tensor.shape[-1 if is_bias or last == kind else 1]
        if dims != (2 if is_bias else 3) or (kind == _PAIR and pairs % 2):
            raise ModelError(
                f"tensor {printable(name)!r} has shape {list(tensor.shape)}, not "
                + ("[experts, outputs]" if is_bias else "[experts, inputs, outputs]"),
                hint="the file is damaged, or of another model",
            )
        slot = "bias" if is_bias else "weight"
        whole = _transposed(tensor) if last == kind else tensor
        if kind == _DOWN:
            yield f"{block}{stem}{_DOWN}.{slot}", whole
            continue
        for first, part in enumerate(_GATE_AND_UP):
            yield f"{block}{stem}{part}.{slot}", _every_other(whole, first)


def with_outputs_first(
    tensors: Iterator[tuple[str, Stored]], model_config: ModelConfig
) -> Iterator[tuple[str, Stored]]:
    """Transpose stacks of experts whose inputs come first, as Qwen3-VL and Llama 4 have them."""
    assert model_config.experts is not None
    dim, inner = model_config.hidden_size, model_config.experts.inner
    turned = {_PAIR: (dim, 2 * inner), _DOWN: (inner, dim)}
    for name, tensor in tensors:
        last = name.rpartition(".experts.")[2]
        is_turned = last in turned and tensor.shape[1:] == turned[last]
        is_square = is_turned and tensor.shape[1] == tensor.shape[2]
        if is_turned and not is_square and not isinstance(tensor, RawTensor):
            tensor = _transposed(tensor)
        yield name, tensor


def _transposed(tensor: StoredWeight) -> StoredWeight:
    """[experts, in, out] floats -> [experts, out, in]"""
    return StoredWeight.from_tensor(tensor.dense.transpose(1, 2))


def _every_other(tensor: StoredWeight, first: int) -> StoredWeight:
    """Half of the outputs, dimension 1; for blocks, a view of the same bytes."""
    if len(tensor.shape) == 2:
        return StoredWeight.from_tensor(tensor.dense[:, first::2])
    shape = (tensor.shape[0], tensor.shape[1] // 2, tensor.shape[2])
    return StoredWeight(tensor.type, shape, tensor.raw[:, first::2])


@dataclass(frozen=True)
class Half:
    """The gates or the ups of a stack, or the whole of a stack that does not alternate.

    Attributes:
        name: of the resulting tensor, outputs first, as in `with_plain_experts`.
        first, step: outputs that are taken.
        is_turned: outputs come last in the file.
    """

    name: str
    first: int
    step: int
    is_turned: bool

    def take(self, expert: StoredWeight) -> StoredWeight:
        """The half of one expert: [in, out] or [out] floats -> [out, in] or [out]."""
        values = expert.dense[..., self.first :: self.step]
        return StoredWeight.from_tensor(values.T if self.is_turned else values)


def halves_of(name: str, dims: int) -> list[Half]:
    """Halves of a float stack in a checkpoint; none for other tensors."""
    block, stem, last = name.rpartition(_EXPERTS)
    kind = last.removesuffix("_bias")
    if not stem or kind not in (_PAIR, _DOWN) or dims != (2 if last != kind else 3):
        return []
    slot = "bias" if last != kind else "weight"
    parts = _GATE_AND_UP if kind == _PAIR else (_DOWN,)
    return [
        Half(f"{block}{stem}{part}.{slot}", first, len(parts), dims == 3)
        for first, part in enumerate(parts)
    ]


@dataclass(frozen=True)
class Stack:
    """A tensor of such a checkpoint and the stacks that it consists of.

    Attributes:
        parts: names of the stacks, outputs first, that alternate in it; or of the only one.
        is_turned: outputs come last.
    """

    name: str
    parts: tuple[str, ...]
    is_turned: bool

    def shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole from the shape of a part."""
        outputs = part[1] * len(self.parts)
        return (part[0], part[2], outputs) if self.is_turned else (part[0], outputs)

    def join(self, parts: Sequence[StoredWeight]) -> StoredWeight:
        """[experts, outputs, inputs] or [experts, outputs] each -> `shape`, fp32."""
        whole = torch.stack([part.dense.float() for part in parts], dim=2).flatten(1, 2)
        return StoredWeight.from_tensor(whole.transpose(1, 2) if self.is_turned else whole)


def stack_between(name: str, dims: int) -> Stack | None:
    """The tensor that a stack with outputs first belongs to; None for other tensors."""
    block, stem, last = name.rpartition(_EXPERTS)
    part, _, slot = last.rpartition(".")
    known = {_DOWN: (_DOWN, (_DOWN,)), **dict.fromkeys(_GATE_AND_UP, (_PAIR, _GATE_AND_UP))}
    if not stem or part not in known or dims != (3 if slot == "weight" else 2):
        return None
    whole, parts = known[part]
    called = f"{block}{stem}{whole}" + ("" if slot == "weight" else "_bias")
    return Stack(called, tuple(f"{block}{stem}{each}.{slot}" for each in parts), slot == "weight")


_KEY_HALF, _VALUE_HALF, _KEYS_AND_VALUES = (
    ".attn_k_b.weight",
    ".attn_v_b.weight",
    ".attn_kv_b.weight",
)


def with_whole_expansions(tensors: Iterator[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    """Join each pair of halves; ModelError if halves are missing or do not match."""
    waiting: dict[str, dict[str, StoredWeight]] = {}
    for name, tensor in tensors:
        last = next((last for last in (_KEY_HALF, _VALUE_HALF) if name.endswith(last)), "")
        if not last or not isinstance(tensor, StoredWeight):
            yield name, tensor
            continue
        block = name.removesuffix(last)
        halves = waiting.setdefault(block, {})
        halves[last] = tensor
        if len(halves) == 2:
            del waiting[block]
            yield (
                block + _KEYS_AND_VALUES,
                join_expansion(block, halves[_KEY_HALF], halves[_VALUE_HALF]),
            )
    if waiting:
        block, halves = next(iter(waiting.items()))
        raise ModelError(
            f"{len(waiting)} layers have half of an expansion: {printable(block)} has "
            f"{printable(', '.join(halves))} alone",
            hint="a file of the model is missing, or damaged",
        )


def half_of_expansion(name: str) -> tuple[int, str, str]:
    """Which half a tensor is (1, 2; 0 = none), and the names of the other half and the whole."""
    for half, (last, other) in enumerate(((_KEY_HALF, _VALUE_HALF), (_VALUE_HALF, _KEY_HALF)), 1):
        if name.endswith(last):
            block = name.removesuffix(last)
            return half, block + other, block + _KEYS_AND_VALUES
    return 0, "", ""


def join_expansion(block: str, keys: StoredWeight, values: StoredWeight) -> StoredWeight:
    has_heads = len(keys.shape) == len(values.shape) == 3 and keys.shape[0] == values.shape[0]
    if not has_heads or keys.shape[1] != values.shape[2]:
        raise ModelError(
            f"{printable(block)}: attn_k_b has shape {list(keys.shape)} and attn_v_b "
            f"{list(values.shape)}, not [heads, rank, plain] and [heads, value, rank]"
        )
    heads = torch.cat([keys.dense.float().transpose(1, 2), values.dense.float()], dim=1)
    return StoredWeight.from_tensor(heads.flatten(0, 1))


_RATE = ".ssm_a"
_FLAT = (".ssm_d", ".ssm_norm.weight")
_CONVOLUTIONS = (".ssm_conv1d.weight", ".shortconv.conv.weight")


def with_plain_states(
    tensors: Iterator[tuple[str, Stored]], facts: StateFacts
) -> Iterator[tuple[str, Stored]]:
    """State tensors of GGUF files as in Hugging Face checkpoints: matrices of one column become
    vectors, and negative decay rates become logarithms."""
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
    """Sort interleaved value heads (one of each key head after another) by key head. Only rows are
    sorted, which no block spans; the gate and the output projection stay as they are
    (`StateFacts.is_tiled`)."""
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


def with_rows_by_part(
    tensors: Iterator[tuple[str, Stored]], model_config: ModelConfig, names: NameMap
) -> Iterator[tuple[str, Stored]]:
    """Outputs first, and all queries before all keys before all values:

    [in, out] -> [out, in]
    [kv heads, (queries of the group, key, value), head_dim, …] -> [q, k, v, …]
    [shards, (queries, values, keys), …] -> [q, k, v, …]
    """
    heads, kv_heads, dim = model_config.num_heads, model_config.num_kv_heads, model_config.head_dim
    rows = torch.arange((heads + 2 * kv_heads) * dim)
    if names.shards:
        q, v, k = rows.view(names.shards, 3, -1).unbind(dim=1)
    else:
        group = heads // kv_heads * dim
        q, k, v = rows.view(kv_heads, -1).split([group, dim, dim], dim=1)
    order = torch.cat([q.flatten(), k.flatten(), v.flatten()])
    for name, tensor in tensors:
        template, _ = split_numbers(name)
        stem = template.rpartition(".")[0]
        if isinstance(tensor, StoredWeight):
            if stem in names.transposed and len(tensor.shape) == 2:
                tensor = StoredWeight.from_tensor(tensor.dense.T)
            if stem in names.grouped and tensor.shape[0] == len(order):
                is_vector = len(tensor.shape) == 1
                sorted_vector = StoredWeight.from_tensor(tensor.dense[order]) if is_vector else None
                tensor = sorted_vector or tensor.rows(order)
        yield name, tensor


_SHARED_BLOCK = re.compile(r"model\.layers\.(\d+)\.shared_transformer\.(.+)")
_ADAPTER = re.compile(
    r"(?:self_attn\.linear_|feed_forward\.)(\w+?)(?:_proj)?_adapter_list\.(\d+)\.([01])\.(.+)"
)
_ADAPTER_PARTS = ("into", "back")


def with_numbered_blocks(
    tensors: Iterator[tuple[str, Stored]], model_config: ModelConfig
) -> Iterator[tuple[str, Stored]]:
    """Rename Zamba2's shared blocks. Checkpoints keep a block under the first layer or under each
    layer that uses it, with the layers' own adapters inside. The result has numbered blocks,
    model.shared.{block}, and adapters under their layers, model.layers.{layer}.beside.{of}."""
    hybrid_layers, seen = model_config.hybrid_layers, set[str]()
    for name, tensor in tensors:
        found = _SHARED_BLOCK.fullmatch(name)
        if found and int(found[1]) in hybrid_layers:
            name = _numbered_block(int(found[1]), found[2], model_config) or name
            if name in seen:
                continue
            seen.add(name)
        yield name, tensor


def _numbered_block(layer: int, rest: str, model_config: ModelConfig) -> str:
    """The new name; "" for an adapter of a layer that does not exist."""
    assert model_config.shared is not None
    hybrid_layers = model_config.hybrid_layers
    own = _ADAPTER.fullmatch(rest)
    if own is None:
        return f"model.shared.{hybrid_layers.index(layer) % model_config.shared.blocks}.{rest}"
    if int(own[2]) >= len(hybrid_layers):
        return ""
    hybrid_layer, part = hybrid_layers[int(own[2])], _ADAPTER_PARTS[int(own[3])]
    return f"model.layers.{hybrid_layer}.beside.{own[1]}.{part}.{own[4]}"
