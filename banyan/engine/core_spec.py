"""CoreSpec: everything besides its inputs that an EngineCore's decisions depend on.

The same spec and the same calls give the same plans. Simulation and replay rely on this.
"""

from collections.abc import Sequence

import msgspec

from banyan.base.errors import CapacityError
from banyan.config.rules.cache import can_have_store, store_wishes
from banyan.config.schema import CacheConfig, Config, LoraConfig
from banyan.dp_attention.step_clock import StepAgreement
from banyan.engine.core import CoreRecorder, EngineCore
from banyan.grammar.base import GrammarFactory
from banyan.kv_cache.cache import KVCache
from banyan.kv_cache.eviction import eviction_key
from banyan.kv_cache.hierarchical_cache import StoreRules
from banyan.kv_cache.sizing import MIB, CacheGroup, MemoryPlan
from banyan.lora.adapter_files import named_adapters
from banyan.lora.scheduling import AdapterRules, Adapters, FirstAdapter
from banyan.messages.spans import ContentKind
from banyan.model_config.media import SoundTowerConfig, TowerConfig, is_cross
from banyan.model_config.model_config import FULL, ModelConfig
from banyan.scheduler.budget import Growth, Priorities, SchedulerLimits
from banyan.scheduler.schedule_policy import SCHEDULE_POLICIES
from banyan.scheduler.scheduler import Scheduler
from banyan.scheduler.spans import ContentLimits, TowerWork

_GIB = 1 << 30
_LEAST_FOR_ADAPTERS = 64 << 20
_STAGED_BYTES = 128 << 20
TOWER_ROWS = 16384
"""Feature rows of a tower that are kept: as many as the largest content of Qwen3-VL has. Where
prompts are not cut, as many as the longest prompt may need."""
_CROSS_BYTES = 2 << 30
"""Features that decoding reads by cross attention, in fp32. Requests wait for their share."""
_LEAST_WRITES, _MOST_WRITES = 4, 64
"""Bounds on the pages that are being written to a store; within them, _STAGED_BYTES decides."""


class CoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Plain values; `order` and `eviction` are names in their tables."""

    groups: tuple[CacheGroup, ...]
    limits: SchedulerLimits
    order: str = "fcfs"
    eviction: str = "lru"
    eviction_numbers: dict[str, int] = {}
    """Parameters of the eviction policy (config/eviction.py)."""
    share: bool = True
    store: StoreRules | None = None
    role: str = ""
    """PD role (disaggregation/scheduling.py); "" = none."""
    adapters: AdapterRules | None = None

    def build(
        self,
        grammars: GrammarFactory | None = None,
        step_agreement: StepAgreement | None = None,
        recorder: CoreRecorder | None = None,
        records_events: bool = False,
    ) -> EngineCore:
        """Build a fresh core.

        Args:
            records_events: record cache events for a publisher.

        Raises:
            ConfigError: a policy has no such name.
        """
        eviction, has_peers = eviction_key(self.eviction, self.eviction_numbers), bool(self.role)
        # A draft model's cache entry of a token depends on the next token: no partial blocks.
        cache = KVCache(
            self.groups,
            eviction,
            share=self.share,
            store=self.store,
            records_events=records_events,
            has_peers=has_peers,
            has_partial_blocks=not self.limits.paid_drafts,
        )
        adapters = None if self.adapters is None else Adapters(self.adapters)
        order = SCHEDULE_POLICIES.load(self.order)
        scheduler = Scheduler(cache, self.limits, order, grammars, self.role, adapters)
        return EngineCore(scheduler, step_agreement, recorder)


def core_spec(
    config: Config,
    model_config: ModelConfig,
    memory: MemoryPlan,
    loads: Sequence[tuple[str, int]] = (),
    are_laid_out: bool = False,
) -> CoreSpec:
    """Collect what the decisions of one replica depend on.

    Args:
        loads: digest and bytes of each adapter that is loaded at the start.
        are_laid_out: memory for all adapters is allocated already.

    Raises:
        CapacityError: the adapters need more memory than they may take.
    """
    schedule = config.schedule
    is_chunked = schedule.chunk_tokens > 0
    reserved = config.handoff.reserved_tokens if config.handoff.mode == "decode" else 0
    most = 0 if are_laid_out else memory_of_adapters(config.lora, memory)
    return CoreSpec(
        groups=memory.groups,
        limits=SchedulerLimits(
            max_running=memory.max_running,
            chunk_tokens=schedule.chunk_tokens if is_chunked else schedule.prefill_tokens,
            max_request_tokens=memory.max_request_tokens,
            depth=schedule.depth,
            max_queued=schedule.max_queued,
            max_queued_tokens=schedule.max_queued_tokens,
            wait_s=schedule.wait_s,
            run_s=schedule.run_s,
            token_gap=schedule.token_gap,
            drafts=config.speculative.drafts,
            draft_levels=config.speculative.levels,
            block_drafts=config.speculative.is_block,
            paid_drafts=config.speculative.is_model,
            fixed_drafts=config.speculative.is_fixed,
            conservativeness=schedule.conservativeness,
            priorities=Priorities(
                are_honoured=schedule.priorities,
                low_first=schedule.low_priority_first,
                preemption_gap=schedule.preemption_gap,
                refuse_when_off=schedule.refuse_priorities,
                max_wait_s=schedule.max_wait_s,
            ),
            whole_prompts=model_config.needs_whole_prompts or not is_chunked,
            max_prompts=schedule.prefill_requests,
            growth=Growth(
                start=schedule.new_token_ratio,
                floor_share=schedule.new_token_floor,
                decay_steps=schedule.new_token_decay,
                retract_steps=schedule.retract_steps,
                clip_tokens=schedule.clip_new_tokens,
                reserved_tokens=reserved,
            ),
            multi_step=schedule.multi_step or 1,
            micro_batch=schedule.micro_batch if schedule.token_gap else 0,
            content=content_limits(model_config, memory, is_chunked),
            attention_ratio=attention_ratio(model_config)
            if schedule.shrinks_chunks and config.parallel.pp > 1 and is_chunked
            else 0.0,
            polling_interval=config.handoff.polling_interval,
        ),
        order=schedule.policy,
        eviction=config.cache.eviction,
        eviction_numbers=config.cache.eviction_numbers,
        share=not (
            config.cache.disable_radix
            or model_config.needs_whole_prompts
            or is_cross(model_config.media)
        ),
        store=_store_rules(config.cache, memory) if can_have_store(config, model_config) else None,
        role=config.handoff.role,
        adapters=_adapter_rules(config.lora, loads, most) if config.lora.is_enabled else None,
    )


def content_limits(
    model_config: ModelConfig, memory: MemoryPlan, is_chunked: bool
) -> ContentLimits:
    """The features that a replica keeps, and what it costs to make them."""
    media = model_config.media
    if media is None:
        return ContentLimits(pool_rows=memory.max_request_tokens)
    towers = [] if media.tower is None else [_patch_work(media.tower)]
    if media.sound is not None:
        towers.append(_mel_work(media.sound.tower))
    layers = range(model_config.num_layers)
    heads = sum(model_config.heads_of(layer) for layer in layers) * model_config.head_dim
    inner = sum(model_config.inner_of(layer) for layer in layers)
    pool_rows = max(TOWER_ROWS, 0 if is_chunked else memory.max_request_tokens)
    if is_cross(model_config.media) and media.sound is not None:
        tower = media.sound.tower
        rows = media.sound.rows(1, tower.window)
        pool_rows = rows * max(
            2, min(memory.max_running + 1, _CROSS_BYTES // (4 * rows * tower.out))
        )
    return ContentLimits(
        pool_rows=pool_rows,
        is_cross=is_cross(model_config.media),
        towers=tuple(towers),
        token_work=model_config.hidden_size * (3 * heads + 3 * inner),
    )


def _patch_work(tower: TowerConfig) -> TowerWork:
    matrices = 3 if tower.mlp == "gated" else 2
    seen = 1.0
    if tower.window:  # other blocks see a window, which costs little
        seen = len(tower.full_blocks) / tower.blocks
    return TowerWork(
        ContentKind.PATCHES,
        tower.blocks,
        patch_work=tower.width * (4 * tower.width + matrices * tower.inner),
        pair_work=int(2 * tower.width * seen),
    )


def _mel_work(tower: SoundTowerConfig) -> TowerWork:
    """Two mel frames become one state."""
    return TowerWork(
        ContentKind.MEL,
        tower.blocks,
        patch_work=tower.width * (4 * tower.width + 2 * tower.inner) // 2,
        pair_work=2 * tower.width // 4,
    )


def attention_ratio(model_config: ModelConfig) -> float:
    """Work of attending to one position, relative to a token's work in all projections."""
    heads, experts = model_config.num_heads, model_config.experts
    projected = (2 * heads + 2 * model_config.num_kv_heads) * model_config.head_dim
    inner = model_config.intermediate_size
    if experts is not None:
        inner = experts.per_token * experts.inner + experts.shared_inner
    weights = model_config.hidden_size * (projected + 3 * inner) * model_config.num_layers
    layers = sum(model_config.kind_of(n) == FULL for n in range(model_config.num_layers))
    return 2 * heads * model_config.head_dim * layers / weights


def _adapter_rules(lora: LoraConfig, loads: Sequence[tuple[str, int]], most: int) -> AdapterRules:
    """most: bytes of memory for all adapters; 0 = not counted."""
    needed = sum(size for _, size in loads)
    if 0 < most < needed:
        raise CapacityError(
            f"the {len(loads)} adapters of --lora-paths take {needed / MIB:,.1f} MiB of memory on "
            f"a rank, and adapters have {most / MIB:,.1f} MiB",
            hint="raise --lora-memory-gib, or name fewer",
        )
    return AdapterRules(
        max_bytes=most,
        max_running=lora.max_running,
        max_loaded=lora.max_loaded,
        eviction=lora.eviction,
        first=tuple(
            FirstAdapter(place.name, place.path, digest, place.is_pinned, size)
            for place, (digest, size) in zip(named_adapters(lora.paths), loads, strict=True)
        ),
    )


def memory_of_adapters(lora: LoraConfig, memory: MemoryPlan) -> int:
    """Bytes that adapters may take on each rank."""
    left = max(0, memory.free_bytes - memory.cache_bytes)
    return int(lora.memory_gib * _GIB) or max(_LEAST_FOR_ADAPTERS, left // 2)


def _store_rules(cache: CacheConfig, memory: MemoryPlan) -> StoreRules:
    wishes = store_wishes(cache)
    page_bytes = memory.cache_bytes // sum(group.num_pages for group in memory.groups)
    return StoreRules(
        write=cache.store_writes,
        prefetch=cache.store_waits,
        threshold=wishes.threshold,
        timeout_s=wishes.timeout_s,
        timeout_per_ki_s=wishes.timeout_per_ki_s,
        max_writes=min(_MOST_WRITES, max(_LEAST_WRITES, _STAGED_BYTES // max(1, page_bytes))),
        is_attached=bool(cache.store),
    )
