"""Layers with adapters: wrappers around packed weights that add the adapter's part of each token.

Models without --enable-lora use none of these.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from banyan.layers.embedding import Embedding, Logits
from banyan.layers.latent_attention import HeadExpansion
from banyan.layers.linear import ColumnLinear, RowLinear
from banyan.lora.adapter_config import EXPANSION, EXPERTS, ROUTER
from banyan.lora.targets import EMBEDDING, GAINS, HEAD, AdaptedRouter, LoRATargets
from banyan.moe.layer import ExpertBlock, Experts, ExpertWeights
from banyan.ops.api import Ops, PackedEmbedding, PackedHeadLinear, PackedLinear
from banyan.ops.experts_api import PackedExperts
from banyan.ops.lora import AdapterTable, ExpertSides, ExpertTable, RowTable

Projection = ColumnLinear | RowLinear
EXPANSION_SUFFIX = ".attention.expansion"
"""End of the module's name in the model."""
ROUTER_SUFFIX = ".mlp.router"


class AdaptedLinear:
    """A packed weight plus the adapters of a projection.

    Args:
        gathers: its input rows were gathered from all ranks.
    """

    def __init__(
        self,
        weight: PackedLinear,
        table: AdapterTable,
        rows: RowTable | None,
        lora_targets: LoRATargets,
        ops: Ops,
        gathers: bool,
    ) -> None:
        self._gathers = gathers
        self._weight = weight
        self._table = table
        self._rows = rows
        self._lora_targets = lora_targets
        self._ops = ops

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out, tokens = self._weight(x, bias), self._lora_targets.tokens_of(self._gathers)
        self._ops.adapt(out, x, self._table, tokens)
        if self._rows is not None:
            self._ops.adapt_rows(out, out, self._rows, tokens)
        return out


class AdaptedEmbedding:
    """A packed embedding plus the adapters' changes."""

    def __init__(
        self, rows: PackedEmbedding, table: RowTable, lora_targets: LoRATargets, ops: Ops
    ) -> None:
        self._rows, self._table = rows, table
        self._lora_targets, self._ops = lora_targets, ops

    def __call__(self, tokens: Tensor) -> Tensor:
        out = self._rows(tokens)
        self._ops.adapt_rows(out, tokens, self._table, self._lora_targets.tokens)
        return out


class AdaptedLogits:
    """The packed weight of logits or class scores plus the adapters' changes.

    Args:
        tables: changes to the outputs, applied in this order.
    """

    def __init__(
        self, weight: PackedLinear, tables: Sequence[RowTable], lora_targets: LoRATargets, ops: Ops
    ) -> None:
        self._weight, self._tables = weight, tables
        self._lora_targets, self._ops = lora_targets, ops

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = self._weight(x, bias)
        for table in self._tables:
            self._ops.adapt_rows(out, x, table, self._lora_targets.outputs)
        return out


def wrap(lora_targets: LoRATargets, name: str, projection: Projection, ops: Ops) -> None:
    """Wrap a filled projection. Later weight updates replace the weight inside the wrapper's model
    slot."""
    lora_targets.add_table(name)
    assert projection.weight is not None
    has_gains = GAINS in lora_targets.kinds
    rows = (
        lora_targets.rows.setdefault(name, RowTable(lora_targets.capacity)) if has_gains else None
    )
    is_added_elsewhere = isinstance(projection, RowLinear) and projection.group.rank
    lora_targets.biases[name] = None if is_added_elsewhere else projection.bias
    own = (projection.weight, lora_targets.tables[name], rows, lora_targets, ops)
    projection.weight = AdaptedLinear(*own, projection.group.gathers)


def wrap_ends(
    lora_targets: LoRATargets, embedding: Embedding, head: nn.Module | None, ops: Ops
) -> None:
    """Wrap the embedding and the head, of logits or classes, if adapters may change them."""
    if EMBEDDING in lora_targets.kinds and embedding.rows is not None:  # of later stages it is None
        table = lora_targets.rows.setdefault("embedding", RowTable(lora_targets.capacity))
        embedding.rows = AdaptedEmbedding(embedding.rows, table, lora_targets, ops)
    if HEAD in lora_targets.kinds and isinstance(head, Logits | ColumnLinear):
        wrap_head(lora_targets, "head", head, ops)


def wrap_head(
    lora_targets: LoRATargets,
    name: str,
    head: Logits | ColumnLinear,
    ops: Ops,
    has_bias: bool = False,
) -> None:
    """Wrap a filled head.

    Args:
        has_bias: adapters replace its bias too.
    """
    assert head.weight is not None
    names = [name, bias_of(name)] if has_bias else [name]
    tables = [lora_targets.rows.setdefault(each, RowTable(lora_targets.capacity)) for each in names]
    head.weight = AdaptedLogits(head.weight, tables, lora_targets, ops)


def bias_of(head: str) -> str:
    """Key of the biases that adapters bring with a head."""
    return f"{head}.bias"


def projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    """Every projection within the model's blocks, by name."""
    for name, module in model.named_modules():
        if name.startswith("layers.") and isinstance(module, ColumnLinear | RowLinear):
            yield name, module


class AdaptedExperts:
    """Packed experts plus the adapters of each (token, expert) pair."""

    def __init__(
        self,
        packed: PackedExperts,
        gate_up: ExpertTable,
        down: ExpertTable,
        lora_targets: LoRATargets,
    ) -> None:
        self._packed, self._lora_targets = packed, lora_targets
        self._gate_up, self._down = gate_up, down

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, sides: ExpertSides | None = None
    ) -> Tensor:
        assert sides is None
        own = ExpertSides(self._gate_up, self._down, self._lora_targets.tokens_of(gathers=True))
        return self._packed(x, ids, weights, own)

    def apart(self, x: Tensor, ids: Tensor) -> Tensor:
        raise AssertionError("experts with adapters are never moved (lora/rules.py)")

    def parts(self, at: int) -> list[Tensor]:
        return self._packed.parts(at)

    def put(self, at: int, parts: list[Tensor]) -> None:
        self._packed.put(at, parts)


def expert_blocks(model: nn.Module) -> Iterator[tuple[str, ExpertBlock]]:
    """Every MoE block, by name."""
    for name, module in model.named_modules():
        if name.startswith("layers.") and isinstance(module, ExpertBlock):
            yield name, module


def add_expert_tables(name: str, experts: Experts, lora_targets: LoRATargets) -> None:
    """Create the tables of a layer's experts."""
    for side, weights in (("gate_up", experts.gate_up), ("down", experts.down)):
        width = lora_targets.max_rank * len(weights.parts)
        lora_targets.experts.setdefault(
            f"{name}.{side}",
            ExpertTable(
                own_inputs(weights),
                len(weights.mine),
                width,
                lora_targets.capacity,
                lora_targets.is_rounded,
            ),
        )


def wrap_experts(name: str, experts: Experts, lora_targets: LoRATargets) -> None:
    """Wrap filled experts. Weights that are loaded later use the same tables."""
    add_expert_tables(name, experts, lora_targets)
    assert experts.packed is not None
    gate_up, down = (lora_targets.experts[f"{name}.{side}"] for side in ("gate_up", "down"))
    experts.packed = AdaptedExperts(experts.packed, gate_up, down, lora_targets)


def own_inputs(weights: ExpertWeights) -> int:
    """Inputs of a projection of experts on this rank."""
    size = weights.shape[1]
    first, last = weights.rule.span(size, weights.group) if weights.rule.dim == 1 else (0, size)
    return last - first


class AdaptedHeadLinear:
    """Packed matrices, one per head, plus the adapters: the absorbed projections of latent
    attention (MLA), which map queries into the latent space and values out of it.

    Args:
        tables: by head.
    """

    def __init__(
        self,
        weight: PackedHeadLinear,
        tables: Sequence[AdapterTable],
        lora_targets: LoRATargets,
        ops: Ops,
    ) -> None:
        self._weight, self._tables = weight, tables
        self._lora_targets, self._ops = lora_targets, ops

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, heads, in]; returns [tokens, heads, out]."""
        out = self._weight(x)
        for head, table in enumerate(self._tables):
            self._ops.adapt(out[:, head], x[:, head], table, self._lora_targets.tokens)
        return out


def expansions(model: nn.Module) -> Iterator[tuple[str, HeadExpansion]]:
    """Every latent expansion (kv_b_proj) within the model's blocks, by name."""
    for name, module in model.named_modules():
        if name.startswith("layers.") and isinstance(module, HeadExpansion):
            yield name, module


def add_head_tables(
    name: str, expansion: HeadExpansion, lora_targets: LoRATargets
) -> tuple[list[AdapterTable], list[AdapterTable]]:
    """Create the tables for this rank's heads: into the latent space, and back."""
    facts, found = expansion.facts, ([], [])
    for head in range(heads_of(expansion)):
        sizes = (facts.plain_dim, facts.rank), (facts.rank, facts.value_dim)
        for side, tables, (inputs, outputs) in zip(("into", "back"), found, sizes, strict=True):
            at = f"{name}.{side}.{head}"
            if at not in lora_targets.tables:
                lora_targets.tables[at] = lora_targets.table(inputs, [outputs])
            tables.append(lora_targets.tables[at])
    return found


def wrap_heads(name: str, expansion: HeadExpansion, lora_targets: LoRATargets, ops: Ops) -> None:
    """Wrap a filled expansion. Weights that are loaded later use the same tables."""
    assert expansion.into is not None and expansion.back is not None
    into, back = add_head_tables(name, expansion, lora_targets)
    expansion.into = AdaptedHeadLinear(expansion.into, into, lora_targets, ops)
    expansion.back = AdaptedHeadLinear(expansion.back, back, lora_targets, ops)


def heads_of(expansion: HeadExpansion) -> int:
    """Number of heads on this rank."""
    first, last = expansion.rule.span(expansion.shape[0], expansion.group)
    return (last - first) // expansion.rule.unit


def enable_heads(model: nn.Module, lora_targets: LoRATargets, ops: Ops) -> None:
    """Wrap all expansions if adapters may change them."""
    for name, expansion in expansions(model):
        lora_targets.slots[name] = expansion.slots()["weight"]
        if EXPANSION in lora_targets.kinds:
            wrap_heads(name, expansion, lora_targets, ops)


def declare_heads(model: nn.Module, lora_targets: LoRATargets) -> None:
    """`enable_heads` for a model without weights."""
    for name, expansion in expansions(model):
        lora_targets.slots[name] = expansion.slots()["weight"]
        add_head_tables(name, expansion, lora_targets)


def enable_experts(model: nn.Module, lora_targets: LoRATargets) -> None:
    """Wrap experts and routers if adapters may change them."""
    for name, block in expert_blocks(model):
        router = f"{name}.router"
        lora_targets.slots[router] = block.router.slots()["weight"]
        if ROUTER in lora_targets.kinds:
            lora_targets.add_table(router, is_exact=True)
            gathers = block.group.gathers and not block.sends_rows
            block.router.adapted = AdaptedRouter(lora_targets.tables[router], lora_targets, gathers)
        if EXPERTS in lora_targets.kinds:
            wrap_experts(f"{name}.experts", block.experts, lora_targets)


def declare_experts(model: nn.Module, lora_targets: LoRATargets) -> None:
    """`enable_experts` for a model without weights."""
    for name, block in expert_blocks(model):
        lora_targets.slots[f"{name}.router"] = block.router.slots()["weight"]
        lora_targets.add_table(f"{name}.router")
        add_expert_tables(f"{name}.experts", block.experts, lora_targets)
