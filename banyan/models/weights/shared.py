"""Names of blocks that layers share (Zamba2). Checkpoints keep a block under the first layer that
takes it, or under each of them, and in it what belongs to one layer alone, by a number of its own:
here blocks are numbered, and layers have what is theirs.
"""

import re
from collections.abc import Iterator

from banyan.model_config.model_config import ModelConfig
from banyan.models.weights.quant.base import Stored

_BLOCK = re.compile(r"model\.layers\.(\d+)\.shared_transformer\.(.+)")
_OWN = re.compile(
    r"(?:self_attn\.linear_|feed_forward\.)(\w+?)(?:_proj)?_adapter_list\.(\d+)\.([01])\.(.+)"
)
_PARTS = ("into", "back")


def with_numbered_blocks(
    tensors: Iterator[tuple[str, Stored]], model_config: ModelConfig
) -> Iterator[tuple[str, Stored]]:
    """Blocks as model.shared.{block}, narrow projections as model.layers.{layer}.beside.{of}."""
    takers, seen = model_config.takers, set[str]()
    for name, tensor in tensors:
        found = _BLOCK.fullmatch(name)
        if found and int(found[1]) in takers:
            name = _numbered(int(found[1]), found[2], model_config) or name
            if name in seen:
                continue
            seen.add(name)
        yield name, tensor


def _numbered(layer: int, rest: str, model_config: ModelConfig) -> str:
    """ "" of what belongs to a layer that there is not."""
    assert model_config.shared is not None
    takers = model_config.takers
    own = _OWN.fullmatch(rest)
    if own is None:
        return f"model.shared.{takers.index(layer) % model_config.shared.blocks}.{rest}"
    if int(own[2]) >= len(takers):
        return ""
    return f"model.layers.{takers[int(own[2])]}.beside.{own[1]}.{_PARTS[int(own[3])]}.{own[4]}"
