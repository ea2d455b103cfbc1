"""ParallelLayout: how a model is divided over devices, and the memory left for the cache."""

from dataclasses import dataclass

from banyan.base.errors import ConfigError
from banyan.config.schema import Config
from banyan.kv_cache.sizing import GroupBytes, MemoryPlan, plan_memory
from banyan.model_config.model_config import WINDOW, ModelConfig
from banyan.sim.hardware import Hardware


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
