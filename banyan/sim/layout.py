"""Hardware and ParallelLayout: facts of a device and its links, and how a model is divided."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.schema import Config
from banyan.kv_cache.sizing import GroupBytes, MemoryPlan, plan_memory
from banyan.model_config.model_config import WINDOW, ModelConfig

_NVLINK_S, _PCIE_S = 1.5e-6, 5e-6
_MEMORY, _MATRIX = 0.8, 0.6
"""Share of the data sheet that a step reaches: read from memory, of the matrix units."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one device reaches in practice, and how it reaches the others of its replica.

    Attributes:
        memory_gib: of one device (2³⁰ bytes).
        bytes_per_s: read from its memory.
        flops_per_s: multiplications and additions of its matrix units.
        overhead_s: of a step, whatever its size.
        link_bytes_per_s: what one device sends to another while it receives as much.
        link_s: until the first byte of a collective is there, on every one of its hops.
    """

    memory_gib: float
    bytes_per_s: float
    flops_per_s: float
    overhead_s: float = 0.0
    link_bytes_per_s: float = 10e9
    link_s: float = 10e-6

    def all_reduce_s(self, ranks: int, size: float) -> float:
        """A ring's time for `size` bytes (Patarasuk and Yuan, JPDC 69(2), 2009)."""
        return 2 * self.gather_s(ranks, size)

    def gather_s(self, ranks: int, size: float) -> float:
        """A ring's time to gather, or to reduce and scatter, `size` bytes in all."""
        hops = ranks - 1
        return hops * (self.link_s + size / ranks / self.link_bytes_per_s)

    def send_s(self, size: float) -> float:
        return self.link_s + size / self.link_bytes_per_s


def _builder(
    memory_gb: float, tb_s: float, tflops: float, link_gb_s: float, link_s: float
) -> Hardware:
    """From a data sheet: decimal gigabytes, dense 16-bit operations, one direction of the link
    between devices of one machine. `link_s` and the overhead of a step are assumptions."""
    return Hardware(
        memory_gib=memory_gb * 1e9 / (1 << 30),
        bytes_per_s=_MEMORY * tb_s * 1e12,
        flops_per_s=_MATRIX * tflops * 1e12,
        overhead_s=100e-6,
        link_bytes_per_s=_MEMORY * link_gb_s * 1e9,
        link_s=link_s,
    )


SHEETS: Mapping[str, Hardware] = {
    "a100-80gb": _builder(80, 2.039, 312, 300, _NVLINK_S),
    "h100-sxm": _builder(80, 3.35, 989, 450, _NVLINK_S),
    "h200-sxm": _builder(141, 4.8, 989, 450, _NVLINK_S),
    "l40s": _builder(48, 0.864, 362, 32, _PCIE_S),
    "l4": _builder(24, 0.3, 121, 32, _PCIE_S),
}
"""Data sheets of nvidia.com (A100 80GB SXM, H100 SXM, H200 SXM, L40S, L4; the last two have PCIe
4.0 x16 and no link of their own)."""


def read_hardware(name: str) -> Hardware:
    """The hardware of a name, or of a JSON file with the fields of `Hardware`.

    Raises:
        ConfigError: neither, or a file with a figure that is missing, unknown or not positive.
    """
    if name in SHEETS:
        return SHEETS[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"there is no hardware {printable(name)!r}",
            hint=f"choose one of: {', '.join(SHEETS)}; or write a JSON file with the fields "
            f"{', '.join(Hardware.__struct_fields__)}",
        )
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Hardware)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{printable(name)!r} is no hardware: {error}") from None
    for field in ("memory_gib", "bytes_per_s", "flops_per_s", "link_bytes_per_s"):
        if not getattr(found, field) > 0:
            raise ConfigError(f"{printable(name)!r}: {field} must be above 0")
    return found


@dataclass(frozen=True)
class ParallelLayout:
    """
    Attributes:
        tp: ranks that every layer is cut over.
        pp: stages that the layers are divided into.
        dp: replicas; with `uses_dp_attention`, replicas of the attention inside one group of
        `tp` ranks. is_joined: the replicas share the feed-forward blocks (data-parallel attention).
        prefill, decode: servers of `tp` ranks and `pp` stages each that compute prompts, and that
            continue them; 0 of both = each does all.
        cp: shares that a step's tokens are divided into for attention, within `tp` ranks.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    uses_dp_attention: bool = False
    prefill: int = 0
    decode: int = 0
    cp: int = 1

    @property
    def devices(self) -> int:
        if self.prefill:
            return self.tp * self.pp * (self.prefill + self.decode)
        return self.tp * self.pp * (1 if self.uses_dp_attention else self.dp)

    @property
    def attention_ranks(self) -> int:
        """Ranks that the attention of one replica, or of one share, is cut over."""
        return self.tp // self.cp // (self.dp if self.uses_dp_attention else 1)

    def __str__(self) -> str:
        parts = [f"tp={self.tp}", f"pp={self.pp}" if self.pp > 1 else ""]
        parts += [f"cp={self.cp}" if self.cp > 1 else ""]
        parts += [
            f"dp={self.dp}" if self.dp > 1 else "",
            "dp-attention" if self.uses_dp_attention else "",
        ]
        parts += [f"prefill={self.prefill},decode={self.decode}" if self.prefill else ""]
        return ",".join(part for part in parts if part)


def read_layout(text: str) -> ParallelLayout:
    """A layout from "tp=8,dp=4,dp-attention".

    Raises:
        ConfigError: a word that is none, a number below 1, more replicas or shares than ranks, or
            what the server does not combine.
    """
    numbers = {"tp": 1, "pp": 1, "dp": 1, "cp": 1, "prefill": 0, "decode": 0}
    uses_dp_attention = False
    for word in text.split(","):
        name, _, value = word.partition("=")
        if word == "dp-attention":
            uses_dp_attention = True
        elif name in numbers and value.isdecimal() and 1 <= int(value) <= 1 << 16:
            numbers[name] = int(value)
        else:
            raise ConfigError(
                f"layout {text!r}: {word!r} is not understood",
                hint="write tp=N, pp=N, dp=N, cp=N, dp-attention, or prefill=N and decode=N, with "
                "commas between",
            )
    layout = ParallelLayout(**numbers, uses_dp_attention=uses_dp_attention)
    if bool(layout.prefill) != bool(layout.decode):
        raise ConfigError(
            f"layout {text!r}: {layout.prefill} prefill and {layout.decode} decode servers",
            hint="give one of each at least",
        )
    if layout.prefill and (layout.dp > 1 or uses_dp_attention):
        raise ConfigError(
            f"layout {text!r}: prefill and decode servers have one replica each",
            hint="leave dp out, and give more servers",
        )
    if layout.cp > 1 and (layout.pp > 1 or uses_dp_attention or layout.prefill):
        raise ConfigError(
            f"layout {text!r}: prompts are divided among the ranks of one stage, and of servers "
            "that do all",
            hint="leave out cp, or the others",
        )
    if layout.tp % layout.cp:
        raise ConfigError(
            f"layout {text!r}: {layout.tp} ranks cannot be divided by {layout.cp} shares"
        )
    if uses_dp_attention and layout.tp % layout.dp:
        raise ConfigError(
            f"layout {text!r}: {layout.tp} ranks cannot be divided by {layout.dp} replicas"
        )
    return layout


@dataclass(frozen=True)
class Weights:
    """Parameter counts of a model over all layers."""

    attention: int
    dense: int
    routed: int
    head: int
    embedding: int

    @staticmethod
    def of(model_config: ModelConfig) -> "Weights":
        experts, latent, hidden = (
            model_config.experts,
            model_config.latent,
            model_config.hidden_size,
        )
        if latent is None:
            rank, width = model_config.query_rank, model_config.num_heads * model_config.head_dim
            queries = rank * (hidden + width) if rank else hidden * width
            attention = queries + hidden * (
                width + 2 * model_config.num_kv_heads * model_config.head_dim
            )
        else:
            key = latent.plain_dim + latent.rope_dim
            queries = model_config.num_heads * key
            attention = hidden * queries
            if latent.query_rank:
                attention = latent.query_rank * (hidden + queries)
            attention += hidden * (latent.rank + latent.rope_dim)
            heads = model_config.num_heads * (latent.plain_dim + latent.value_dim)
            attention += latent.rank * heads + model_config.num_heads * latent.value_dim * hidden
            indexer = latent.query_rank * latent.index_heads * latent.index_dim
            attention += indexer + hidden * (latent.index_dim + latent.index_heads)
        dense = routed = 0
        for layer in range(model_config.num_layers):
            if experts is None or layer in experts.dense_layers:
                dense += 3 * hidden * model_config.intermediate_size
            else:
                gates = experts.count + experts.has_shared_gate
                dense += 3 * hidden * experts.shared_inner + hidden * gates
                routed += 3 * hidden * experts.inner * experts.count
        head = hidden * model_config.vocab_size
        embedding = 0 if model_config.tie_embeddings else head
        more = sum(
            model_config.heads_of(layer) - model_config.num_heads
            for layer in range(model_config.num_layers)
        )
        attention = model_config.num_layers * attention + 2 * hidden * model_config.head_dim * more
        if model_config.has_head_gates:
            attention += hidden * (model_config.num_layers * model_config.num_heads + more)
        return Weights(attention, dense, routed, head, embedding)

    @property
    def total(self) -> int:
        return self.attention + self.dense + self.routed + self.head + self.embedding


def kept_share(model_config: ModelConfig, ranks: int) -> float:
    """Part of a token's cache that one of `ranks` keeps: whole heads, or all of a latent vector."""
    if model_config.latent is not None:
        return 1.0
    return -(-model_config.num_kv_heads // ranks) / model_config.num_kv_heads


def weights_per_device(
    model_config: ModelConfig, layout: ParallelLayout, weight_bytes: float
) -> float:
    weights = Weights.of(model_config)
    cut = (weights.dense + weights.routed + weights.head + weights.embedding) / layout.tp
    return weight_bytes * (weights.attention / layout.attention_ranks + cut) / layout.pp


def cache_groups(
    config: Config, model_config: ModelConfig, layout: ParallelLayout, cache_bytes: float
) -> list[GroupBytes]:
    """The groups of pages on one device, in the order of their first layers.

    Args:
        cache_bytes: of one number.
    """
    size = config.cache.page_size
    token = (
        model_config.kept_per_token * kept_share(model_config, layout.attention_ranks) * cache_bytes
    )
    kinds = [model_config.kind_of(layer) for layer in range(model_config.num_layers)]
    return [
        GroupBytes(
            kind,
            round(size * token * kinds.count(kind) / layout.pp),
            model_config.window if kind == WINDOW else 0,
        )
        for kind in dict.fromkeys(kinds)
    ]


def room_for_cache(
    config: Config,
    model_config: ModelConfig,
    hardware: Hardware,
    layout: ParallelLayout,
    weight_bytes: float,
    cache_bytes: float,
) -> MemoryPlan:
    """How one device's memory is divided, as the engine would.

    Raises:
        CapacityError: the weights leave no room.
    """
    held = round(weights_per_device(model_config, layout, weight_bytes))
    total = round(hardware.memory_gib * (1 << 30))
    return plan_memory(
        config.cache,
        config.schedule,
        context_length=config.model.context_length or model_config.context_length,
        groups=cache_groups(config, model_config, layout, cache_bytes),
        process_bytes=held,
        total_bytes=total,
        free_bytes=max(0, total - held),
    )
