"""What an adapter of `kv_b_proj` is to latent attention, where keys and values of a head are two
matrices on either side of the attention: keys meet the queries, values what has been attended to.
"""

from collections.abc import Iterator

from torch import nn

from banyan.layers.weight_slot import WeightSlot
from banyan.lora.adapter_config import EXPANSION
from banyan.lora.head_layers import expansions, seat_heads, wrap_heads
from banyan.lora.targets import LoRATargets
from banyan.model_config.model_config import LatentFacts
from banyan.ops.api import Ops
from banyan.ops.lora import Part
from banyan.ops.stored import StoredWeight

ENDING = ".attention.expansion"
"""Of the module's name in the model."""


def open_heads(model: nn.Module, lora_targets: LoRATargets, ops: Ops) -> None:
    """Wrap expansions, where they were asked for."""
    for name, expansion in expansions(model):
        lora_targets.slots[name] = expansion.slots()["weight"]
        if EXPANSION in lora_targets.kinds:
            wrap_heads(name, expansion, lora_targets, ops)


def seat_on_paper(model: nn.Module, lora_targets: LoRATargets) -> None:
    """The same for a model without weights."""
    for name, expansion in expansions(model):
        lora_targets.slots[name] = expansion.slots()["weight"]
        seat_heads(name, expansion, lora_targets)


def head_parts(
    module: str,
    slot: WeightSlot,
    facts: LatentFacts,
    down: StoredWeight,
    up: StoredWeight,
    scale: float,
) -> Iterator[tuple[str, list[Part]]]:
    """By table: what lies beside the heads of this rank. The matrix of the keys is used turned
    round, and so are those of the adapter.

    down: [rank, latent]; up: [heads · (plain_dim + value_dim), rank].
    """
    mine = slot.rules[""].cut(up, slot.group).dense
    heads = mine.view(-1, facts.plain_dim + facts.value_dim, mine.shape[1])
    shared = down.dense.contiguous()
    turned = shared.t().contiguous()
    for head, both in enumerate(heads):
        keys, values = both.split([facts.plain_dim, facts.value_dim])
        yield f"{module}.into.{head}", [Part(0, keys.t().contiguous(), turned, scale)]
        yield f"{module}.back.{head}", [Part(0, shared, values.contiguous(), scale)]
