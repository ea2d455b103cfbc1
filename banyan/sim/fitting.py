"""Estimate whether a model fits a machine, before anything is loaded.

Weights and cache are computed from the model config. `kv_cache/sizing.py` divides the remaining
memory as in the engine.
"""

from dataclasses import dataclass

from banyan.base.errors import ConfigError
from banyan.config.schema import Config
from banyan.kv_cache.sizing import MemoryPlan, plan_memory
from banyan.model_config.model_config import ModelConfig
from banyan.sim.layout import ParallelLayout, cache_groups, weights_per_device

LIBRARY_BYTES = 256 << 20
"""Approximate memory of an engine process without weights: its libraries."""

_NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CACHE_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0}
_SCALE_BYTES = 4
"""Size of a scale of an int8 cache: one for each head and token, or for each latent vector."""


@dataclass(frozen=True)
class AvailableMemory:
    """Memory that the ranks of one machine may share.

    Attributes:
        total_bytes, free_bytes: of the device; of the machine where `is_host`.
        is_host: ranks and replicas share it.
    """

    total_bytes: int
    free_bytes: int
    is_host: bool


@dataclass(frozen=True)
class MemoryFit:
    """What one rank will hold.

    Attributes:
        weight_bytes: of this rank.
        activation_bytes: of the largest step, about; no room is kept for them.
        token_bytes: cache of one token, where every layer keeps it.
        memory: how the rest is divided.
    """

    weight_bytes: int
    activation_bytes: int
    token_bytes: float
    memory: MemoryPlan

    def at_once(self, context: int) -> int:
        """Requests of so many tokens, prompt and answer, that fit the cache together."""
        if context > self.memory.max_request_tokens:
            return 0
        size = self.memory.groups[0].page_tokens
        pages = -(-context // size)
        return min(self.memory.max_running, self.memory.max_total_tokens // (pages * size))


def fit(
    config: Config, model_config: ModelConfig, room: AvailableMemory, weight_bytes: float
) -> MemoryFit:
    """How a model that `config` serves would lie in memory; `config` has nothing left open.

    Args:
        weight_bytes: of one weight, on average.

    Raises:
        CapacityError: it does not fit.
        ConfigError: layers keep a state, which is not counted here.
    """
    if model_config.has_states:
        raise ConfigError(
            "this model is not planned: some of its layers keep a state, which is not counted here",
            hint="start it: the log has the memory that is left for the cache",
        )
    parallel = config.parallel
    layout = ParallelLayout(
        parallel.tp, parallel.pp, parallel.dp, parallel.uses_dp_attention, cp=parallel.cp
    )
    weights = round(weights_per_device(model_config, layout, weight_bytes))
    sharers = parallel.local_world * parallel.local_replicas if room.is_host else 1
    per_number = cache_bytes_of(config, model_config, room.is_host)
    groups = cache_groups(config, model_config, layout, per_number)
    held = LIBRARY_BYTES + weights
    memory = plan_memory(
        config.cache,
        config.schedule,
        context_length=config.model.context_length or model_config.context_length,
        groups=groups,
        process_bytes=held,
        total_bytes=room.total_bytes // sharers,
        free_bytes=max(0, room.free_bytes // sharers - held),
    )
    token = sum(group.page_bytes for group in groups) / config.cache.page_size
    return MemoryFit(weights, _activations(config, model_config), token, memory)


def cache_bytes_of(config: Config, model_config: ModelConfig, is_host: bool) -> float:
    """Bytes of one number in the cache, scales shared out."""
    kind = config.cache.dtype
    if kind == "int8":
        vectors = 2 if model_config.latent is not None else 2 * model_config.num_kv_heads
        return 1.0 + _SCALE_BYTES * vectors / model_config.kept_per_token
    if kind in _CACHE_BYTES:
        return _CACHE_BYTES[kind]
    plain = _NUMBER_BYTES[config.model.activation_dtype]
    rounds = is_host and plain == 4 and config.model.cpu_activations != "fp32"
    return 2.0 if rounds else float(plain)


def _activations(config: Config, model_config: ModelConfig) -> int:
    """Of one step with a full chunk: what a layer keeps at a time, and the logits of every row."""
    chunk = max(config.schedule.chunk_tokens, 1)
    inner = max(model_config.inner_of(layer) for layer in range(model_config.num_layers))
    width = (
        4 * model_config.hidden_size
        + 3 * inner
        + 2 * max(model_config.num_heads, model_config.window_heads) * model_config.head_dim
    )
    logits = config.schedule.running_cap * model_config.vocab_size * 4
    return chunk * width * _NUMBER_BYTES[config.model.activation_dtype] + logits
