# pyright: basic
"""Opens the device, the groups of ranks and the weights of one rank, and plans its memory.

`engine/core_process.py` builds engine and runner on the result. `place_rank` chooses the cores of a
rank. It runs before the rank opens its device, because threads inherit the cores of the thread
that starts them.
"""

import gc
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import torch

from banyan.base.clock import Clock
from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.base.memory import give_back, runs_the_process
from banyan.base.os import available_cores, is_loopback
from banyan.base.torch_parts import complete_torch
from banyan.config.defaults import settings_of, settle
from banyan.config.env import keep_ranks_local
from banyan.config.flags.device import ATTENTION
from banyan.config.rules.cache import can_have_store
from banyan.config.rules.execution import with_draft_attention
from banyan.config.schema import Config, DeviceConfig, LoadConfig, ParallelConfig, SpeculativeConfig
from banyan.config.speculation import longest_branch
from banyan.engine.core_spec import TOWER_ROWS
from banyan.formats.shards import parallel_reads
from banyan.kv_cache.sizing import MIB, GroupBytes, MemoryPlan, plan_memory
from banyan.layers.build import Build, SideStream
from banyan.layers.cache_spec import PageGroup, align_groups, group_caches, numbered_through
from banyan.lora.adapter_config import EXPERTS
from banyan.lora.pool import open_lora_targets
from banyan.lora.targets import StackLayout
from banyan.model_config.draft_model import draft_model_config, draft_of
from banyan.model_config.model_config import STATE, ModelConfig, stored_head_dim
from banyan.model_config.quantization import read_kv_scales
from banyan.models.base import Model
from banyan.moe.expert_location import open_expert_map
from banyan.moe.routing_record import open_expert_watch
from banyan.moe.rules import (
    LIMIT,
    are_placed,
    check_exchange_size,
    is_fused,
    sends_rows,
    slot_bytes,
)
from banyan.ops.api import Ops
from banyan.ops.bind import BoundOps, Toolkit, bind, kernel_table, open_toolkit
from banyan.parallel.groups import GroupsConfig, open_groups
from banyan.platform import open_platform
from banyan.platform.base import Memory, Platform, Traits
from banyan.runner.kvstore import GroupLayout
from banyan.runner.offload import Offload, open_offload
from banyan.runner.runner_config import RunnerConfig
from banyan.runner.speculative.draft_runner import DraftModel
from banyan.runner.weight_update import (
    load_dflash_drafter,
    load_eagle_drafter,
    load_mtp,
    load_weights,
)
from banyan.scheduler.budget import DRAFT_BUDGET

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_CACHE_DTYPES = {
    "auto": None,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_OWN = frozenset(("shared", "peer memory"))
"""Our own collectives."""
_MULTI_STREAM = "SGLANG_NPU_USE_MULTI_STREAM"
_WHOLE_PROMPTS = 8192
"""Tokens of the largest step to record where prompts are not cut into chunks."""
log = logger(__name__)


class Phases:
    """Seconds of each start-up phase, in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.now()
        self.seconds: dict[str, float] = {}

    def done(self, name: str) -> None:
        now = self._clock.now()
        self.seconds[name] = now - self._began
        self._began = now


@dataclass(frozen=True)
class OpenModel:
    """A device with the model's weights on it, before the KV cache is allocated.

    Attributes:
        config: the flags, with defaults of the device filled in.
        settings: the fields that the device has decided, "part.field" -> value.
        kernels: table of the kernels in use, for the log.
        threads: per rank.
        draft: the draft model; None if no model drafts.
        offload: the weights kept in host memory.
    """

    config: Config
    model_config: ModelConfig
    settings: dict[str, object]
    platform: Platform
    build: Build
    model: Model
    kernels: str
    threads: int
    draft: DraftModel | None = None
    offload: Offload | None = None


def open_model(
    config: Config, model_config: ModelConfig, rank: int, mesh_address: str, phases: Phases
) -> OpenModel:
    """Open the device, meet the other ranks, load this rank's share of the weights."""
    parallel = config.parallel
    here, place = parallel.local_world, rank % parallel.local_world
    place_rank(config.device, parallel, place)
    platform = open_platform(config.device.name)
    traits = platform.traits
    if not traits.is_host:
        complete_torch()
    _check_the_device(config, model_config, traits)
    config, origins = settle(config, platform.defaults(model_config))
    sharers = 1 if is_placed(config.device) else here * parallel.local_replicas
    threads = config.parallel.threads or max(1, traits.cores // sharers)
    device = platform.open(_number_of(config, traits, place), threads)
    phases.done("device")
    dtype = _DTYPES[config.model.activation_dtype]
    offload = open_offload(config.device, platform)
    # Experts that move and backups are copied as bytes.
    has_backup = config.device.weights_backup or config.device.draft_backup
    is_copied = config.experts.balances or has_backup
    keeps_plain = offload is not None or is_copied
    toolkit = _open_toolkit(config, config.model, traits, threads, keeps_plain)
    ops = _bind(config, model_config, traits, device, toolkit)
    phases.done("kernels")
    exchanged = exchanged_tokens(config, traits)
    meeting = urlsplit(mesh_address)
    if meeting.scheme == "file" or is_loopback(meeting.hostname or ""):
        keep_ranks_local()
    groups = open_groups(
        GroupsConfig(
            rank,
            parallel.attention_ranks,
            mesh_address,
            _collectives_of(config, traits),
            parallel.meet_timeout_s,
            recorder=ops.recorder,
            is_crowded=threads * sharers > traits.cores,
            are_experts_apart=parallel.ep > 1,
            stages=parallel.pp,
            replica=parallel.replica if parallel.uses_dp_attention else 0,
            replicas=parallel.dp if parallel.uses_dp_attention else 1,
            replicates_lm_head=parallel.replicates_lm_head,
            is_dense_whole=parallel.dense_tp == 1,
            shares=parallel.cp,
            split=parallel.cp_split,
            slot_bytes=slot_bytes(config, model_config),
            has_exchange=bool(exchanged),
            interface=parallel.interface,
            uses_own_sums=parallel.avoids_own_collectives and not _OWN & set(traits.collectives),
            checks_peers=parallel.checks_peers,
        )
    )
    if parallel.world > 1 or parallel.uses_dp_attention:
        phases.done("meeting")
    is_rounded = config.model.cpu_activations != "fp32" and (
        config.model.rounds or not model_config.stores_floats
    )
    keeps_parts = cast(BoundOps, ops).is_reference("adapt")
    stacked = StackLayout(dtype, device)
    lora_targets = open_lora_targets(config.lora, traits, is_rounded, keeps_parts, stacked)
    build = Build(
        ops=ops,
        groups=groups,
        dtype=dtype,
        device=device,
        kv_units=read_kv_scales(config, model_config, groups.attention.rank),
        adapters=lora_targets,
        watch=open_expert_watch(config, model_config, groups, traits, ops.recorder, device),
        places=open_expert_map(config, model_config, groups, device),
        sends_rows=sends_rows(config),
        exchanged=exchanged,
        is_fused=bool(fused_mode(config)),
        side_stream=_open_side_stream(config, model_config, platform),
        ranges=platform.ranges() if config.model.marks_layers else None,
        state_dtype=_DTYPES[config.cache.state_dtype],
    )
    if model_config.format == "gguf" and not traits.is_host:
        kept = ", ".join(cast(BoundOps, ops).kept_types)
        rest = f"except {kept}" if kept else "all of them"
        log.info("quantised weights become %s at load, %s", config.model.activation_dtype, rest)
    if config.model.loader_threads:
        log.info("%d threads read the weights", config.model.loader_threads)
    with parallel_reads(model_config.path, config.model.loader_threads, place, here):
        model = load_weights(config.model, model_config, build, offload)
    draft = None
    if config.speculative.is_model:
        if draft_of(config).quantization != config.model.quantization:
            toolkit = _open_toolkit(config, draft_of(config), traits, threads, is_copied)
        draft = _open_draft(config, model_config, traits, model, build, toolkit)
    gc.collect()
    if runs_the_process():
        gc.freeze()  # the model's objects live long: never walk them again
    give_back()
    phases.done("weights")
    settings = settings_of(config, origins)
    kernels = kernel_table(cast(BoundOps, ops).choices)
    return OpenModel(
        config=config,
        model_config=model_config,
        settings=settings,
        platform=platform,
        build=build,
        model=model,
        kernels=kernels,
        threads=threads,
        draft=draft,
        offload=offload,
    )


def _collectives_of(config: Config, traits: Traits) -> tuple[str, ...]:
    """Collective libraries, best first; --disable-custom-all-reduce leaves our own out. (A device
    without one then takes its library's all-reduce, instead of sums in the order of the ranks.)"""
    own = _OWN if config.parallel.avoids_own_collectives else ()
    return tuple(name for name in traits.collectives if name not in own)


def _open_side_stream(
    config: Config, model_config: ModelConfig, platform: Platform
) -> SideStream | None:
    """Open the stream for shared experts; None if they run before the routed ones."""
    if not (config.experts.has_side_stream or config.experts.overlaps):
        return None
    why = "" if platform.traits.async_launch else f"{platform.traits.name} has no streams"
    if model_config.experts is None or not model_config.experts.shared_inner:
        why = "this model has no shared experts"
    if not why:
        return platform.side_stream()
    name = "--enable-single-batch-overlap" if config.experts.overlaps else _MULTI_STREAM
    log.info("%s has no effect: %s", name, why)
    return None


def _open_draft(
    config: Config,
    served: ModelConfig,
    traits: Traits,
    target: Model,
    build: Build,
    toolkit: Toolkit,
) -> DraftModel:
    """Open the draft model on the ranks and the device of the target model."""
    model = draft_of(config)
    is_mtp = config.speculative.is_mtp
    model_config = served if is_mtp else draft_model_config(config.speculative, model, served)
    ops = _bind(with_draft_attention(config), model_config, traits, build.device, toolkit)
    # Drafts are only guesses: scales, adapters and expert placement are left out.
    mine = replace(build, ops=ops, kv_units=(), adapters=None, watch=None, places=None)
    if build.groups.dp_batch is not None:  # other replicas may have nothing to draft for
        own_groups = build.groups.of_one_replica()
        mine = replace(mine, groups=own_groups, sends_rows=False, exchanged=0)
    if is_mtp:
        log.info("draft layer=%d", model_config.num_layers)
        mtp = load_mtp(model, model_config, target, mine, config.cache.page_size)
        return DraftModel(mtp, mine, mtp)
    if config.speculative.is_eagle:
        log.info("draft model=%s layers=%d", printable(model.source), model_config.num_layers)
        eagle = load_eagle_drafter(
            model, model_config, target, mine, config.cache.page_size, config.model
        )
        return DraftModel(eagle, mine, eagle)
    log.info("draft model=%s layers=%d", printable(model.source), model_config.num_layers)
    if config.speculative.is_block:
        blocks = load_dflash_drafter(model, model_config, target, mine)
        return DraftModel(blocks, mine, blocks=blocks)
    return DraftModel(load_weights(model, model_config, mine), mine)


def _open_toolkit(
    config: Config, model: LoadConfig, traits: Traits, threads: int, keeps_plain: bool = False
) -> Toolkit:
    """Open what the kernels of one model share, as the flags ask for it."""
    options = {
        "offload": "plain" if keeps_plain and traits.has_own_forms else "",
        "quantization": model.quantization,
        "cpu-compiler": config.device.compiler,
        "cpu-isa": config.device.isa,
        "fp8-gemm-backend": config.device.fp8_backend.removeprefix("auto"),
        "fuseep-mode": str(fused_mode(config) or ""),
    }
    return open_toolkit(traits.name, threads, {k: v for k, v in options.items() if v})


def _bind(
    config: Config,
    model_config: ModelConfig,
    traits: Traits,
    device: torch.device,
    toolkit: Toolkit,
) -> Ops:
    """Choose the kernels of one model on this rank."""
    return bind(
        traits.name,
        device,
        _DTYPES[config.model.activation_dtype],
        traits.features,
        stored_head_dim(model_config),
        config.device.kernels,
        exact=config.model.cpu_activations == "fp32",
        cache_dtype=_CACHE_DTYPES[config.cache.dtype],
        page_size=config.cache.page_size,
        exact_head=config.device.exact_head,
        toolkit=toolkit,
        torch_phase=config.device.torch_phase,
        sees_ahead=model_config.media is not None and model_config.media.is_mutual,
    )


def groups_of(opened: OpenModel) -> tuple[PageGroup, ...]:
    """The page groups of the KV cache, including the draft model's layers."""
    draft = () if opened.draft is None else opened.draft.model.caches
    caches = numbered_through([opened.model.caches, draft])
    return align_groups(opened.model_config, group_caches(caches))


def agree_on_memory(opened: OpenModel) -> tuple[Memory, list[GroupBytes]]:
    """Exchange memory sizes after all ranks have loaded their weights. All ranks must call this.

    Every rank runs the same plans, so the rank with the least memory decides.

    Returns:
        The least memory of any rank, and the largest page of each group on any rank.
    """
    world, mine = opened.build.groups.everyone, opened.platform.memory()
    page_size = opened.config.cache.page_size
    groups = [
        GroupBytes(group.kind, group.page_bytes(page_size), group.window)
        for group in groups_of(opened)
    ]
    if world.size == 1:
        return mine, groups
    least = (mine.total_bytes, mine.free_bytes, -mine.ours_bytes)
    numbers = [n / MIB for n in (*least, *(-group.page_bytes for group in groups))]
    own = torch.tensor([numbers], device=opened.build.device)
    everyone = world.all_gather(own, own.numel() * world.size).view(world.size, -1)
    total, free, ours, *pages = (round(n * MIB) for n in everyone.amin(0).tolist())  # sync: once
    agreed = [replace(g, page_bytes=-n) for g, n in zip(groups, pages, strict=True)]
    return Memory(total, free, -ours), agreed


def plan_the_memory(opened: OpenModel) -> MemoryPlan:
    """Divide the memory between weights, KV cache, rollback checkpoints and feature rows."""
    config = opened.config
    found, groups = agree_on_memory(opened)
    is_host = opened.platform.traits.is_host  # ranks and replicas share its memory
    sharers = config.parallel.local_world * config.parallel.local_replicas if is_host else 1
    # A state after each draft token, for rollback when drafts are rejected.
    state_bytes = sum(group.page_bytes for group in groups if group.kind == STATE)
    running = config.schedule.max_running or config.schedule.running_cap or DRAFT_BUDGET
    context_length = config.model.context_length or opened.model_config.context_length
    reserved = draft_room_of(config, running) * state_bytes
    media = opened.model_config.media
    if media is not None and media.tower is not None:
        rows = max(TOWER_ROWS, 0 if config.schedule.chunk_tokens > 0 else context_length)
        reserved += rows * media.tower.feature_width * opened.build.dtype.itemsize
    return plan_memory(
        config.cache,
        config.schedule,
        context_length=context_length,
        groups=groups,
        process_bytes=found.ours_bytes + reserved,
        total_bytes=found.total_bytes // sharers,
        free_bytes=max(0, found.free_bytes // sharers - reserved),
    )


def draft_room_of(config: Config, running: int) -> int:
    """Most drafts that one step of `running` rows verifies."""
    return min(DRAFT_BUDGET, running * config.speculative.drafts)


def runner_config_of(opened: OpenModel, memory: MemoryPlan) -> RunnerConfig:
    config = opened.config
    chunk_tokens = config.schedule.chunk_tokens
    chunk = min(chunk_tokens if chunk_tokens > 0 else _WHOLE_PROMPTS, memory.max_request_tokens)
    draft_room = draft_room_of(config, memory.max_running)
    check_exchange_size(config, memory.max_running + draft_room)
    return RunnerConfig(
        max_slots=memory.max_running,
        max_length=memory.max_request_tokens,
        groups=tuple(
            GroupLayout(declared.kind, declared.window, group.page_tokens, group.num_pages)
            for declared, group in zip(groups_of(opened), memory.groups, strict=True)
        ),
        max_tokens=0 if config.device.is_eager else chunk + memory.max_running + draft_room,
        shapes=() if config.device.is_eager else config.device.shapes,
        prompt_shapes=() if config.device.is_eager else config.device.prompt_shapes,
        is_unpadded=config.device.is_unpadded,
        attention="" if config.device.attention in ATTENTION else config.device.attention,
        draft_room=draft_room,
        verified=config.speculative.num_tokens if config.speculative.drafts else 0,
        shares_pages=config.parallel.world > 1
        and (bool(config.handoff.role) or can_have_store(config, opened.model_config)),
        multi_step=config.schedule.multi_step,
        branching=longest_branch(config.speculative),
        raw_logprobs=config.schedule.raw_logprobs,
        collects_in_capture=config.device.collects_in_capture,
        profiles_capture=config.device.profiles_capture,
        accept_single=config.speculative.accept_single,
        accept_total=config.speculative.accept_total,
        sparsity=config.sparsity,
        reads_all=config.model.is_watched or opened.build.watch is not None,
    )


def _check_the_device(config: Config, model_config: ModelConfig, traits: Traits) -> None:
    """Refuse flags that this device cannot honour."""
    parallel = config.parallel
    if config.speculative.drafts and not traits.is_host:
        check_drafts(config.speculative, traits, model_config)
    if parallel.uses_dp_attention and not traits.shares_steps:
        raise ConfigError(
            "--enable-dp-attention: replicas share feed-forward blocks on CPUs, CUDA devices and "
            f"Ascend NPUs only, this is {traits.name}",
            hint="leave the flag out; --data-parallel-size starts independent replicas",
        )
    if parallel.cp > 1 and not traits.shares_steps:
        raise ConfigError(
            f"--attn-cp-size {parallel.cp}: prompts are divided among ranks on CPUs, CUDA devices "
            f"and Ascend NPUs only, this is {traits.name}",
            hint="leave it out; --tensor-parallel-size cuts the heads",
        )
    if sends_rows(config) and (not traits.is_host or is_fused(config)):
        check_dispatch(config, model_config, traits)
    if config.device.memory_saver and not (traits.is_host or traits.releases_memory):
        raise ConfigError(
            f"--enable-memory-saver: memory of {traits.name} is not released while the server runs",
            hint="leave it out",
        )
    check_the_rounding(config.model.quantization, model_config, traits)


def check_the_rounding(quantization: str, model_config: ModelConfig, traits: Traits) -> None:
    """Refuse a quantisation that would leave some float weights unquantised.

    Raises:
        ConfigError: experts cannot be quantised on this device.
    """
    can_round = traits.is_host or traits.rounds_experts
    if quantization and model_config.experts is not None and not can_round:
        raise ConfigError(
            f"--quantization {quantization}: experts are not rounded on {traits.name}",
            hint="leave it out",
        )


def check_drafts(
    speculative: SpeculativeConfig, traits: Traits, model_config: ModelConfig | None = None
) -> None:
    """Refuse drafts that an accelerator cannot make or verify."""
    if not traits.verified:
        raise ConfigError(
            f"--speculative-algorithm {speculative.algorithm} on {traits.name}: drafts are "
            "made on the host, and wait there for every step of the device",
            hint="leave it out, or use --device cpu",
        )
    if speculative.is_block:
        raise ConfigError(
            f"--speculative-algorithm {speculative.algorithm} on {traits.name}: masks of a block "
            "that read each other are read on the host alone",
            hint="use EAGLE3 where there is a model for this one, NGRAM, or --device cpu",
        )
    if model_config is not None and model_config.has_states and not traits.rolls_back:
        raise ConfigError(
            f"--speculative-algorithm {speculative.algorithm} on {traits.name}: layers of this "
            "model keep a state, which can only be rolled back after rejected drafts on a CPU",
            hint="leave it out, or use --device cpu",
        )
    if speculative.num_tokens > traits.verified:
        raise ConfigError(
            f"--speculative-num-draft-tokens {speculative.num_tokens} on {traits.name}: a row "
            f"verifies at most {traits.verified} tokens there",
            hint=f"give {traits.verified} or less",
        )


def _number_of(config: Config, traits: Traits, place: int) -> int:
    """Number of the device that a rank opens."""
    device = config.device
    if not traits.is_host:
        return device_number(device, config.parallel, place)
    if device.first_number or device.number_step != 1:
        raise ConfigError(
            f"--base-gpu-id {device.first_number} and --gpu-id-step {device.number_step} on "
            f"{traits.name}: it has no devices by number",
            hint="leave them out; --numa-node says where ranks run",
        )
    return place


_MODE = "--deepep-mode"
_MIB = 1 << 20


def exchanged_tokens(config: Config, traits: Traits) -> int:
    """Most tokens per rank of an all-to-all of fixed size; 0 = it is not used."""
    is_asked = sends_rows(config) and config.experts.a2a_mode != "normal"
    return config.experts.a2a_tokens if is_asked and traits.dispatch is not None else 0


def fused_mode(config: Config) -> int:
    """The operator that does all-to-all and experts at once; 0 = separate operators."""
    return config.experts.fuse_mode if sends_rows(config) and is_fused(config) else 0


def check_fused_dispatch(config: Config, model_config: ModelConfig, traits: Traits) -> None:
    """Raises:
    ConfigError: no operator of this device fuses all-to-all and experts for this model.
    """
    experts, facts = config.experts, model_config.experts
    flag, hint = f"--moe-a2a-backend {experts.a2a} on {traits.name}", "give deepep"
    if experts.fuse_mode > len(traits.fused_dispatch):
        raise ConfigError(f"{flag}: only Ascend A3s have an operator that does so", hint=hint)
    limits = traits.fused_dispatch[experts.fuse_mode - 1]
    assert facts is not None
    width, ranks = facts.latent or model_config.hidden_size, config.parallel.ep
    size = (experts.a2a_tokens, width, 2 * facts.inner, facts.per_token, ranks, facts.count)
    why = _incompatible_feature(config) or limits.obstacle(*size)
    if not why and config.model.activation_dtype != "bfloat16":
        why = f"it computes in bfloat16, --dtype is {config.model.activation_dtype}"
    if not why and (config.device.offload_gib or config.device.offload_group > 0):
        why = "its experts lie in a form of their own, which memory of the host does not keep"
    if why:
        bound = f"; {LIMIT} is {experts.a2a_tokens}"
        raise ConfigError(
            f"{flag}: {why}" + (bound if experts.a2a_tokens > limits.tokens else ""), hint=hint
        )
    needed = limits.buffer_bytes(experts.a2a_tokens, width, facts.per_token, ranks, facts.count)
    message = (
        "rows of %d tokens a rank are sent and computed in one over %d ranks: a buffer of %d MB"
    )
    log.info(message, experts.a2a_tokens, ranks, -(-needed // _MIB))


def check_dispatch(config: Config, model_config: ModelConfig, traits: Traits) -> None:
    """Raises:
    ConfigError: this device, which is not the host, does not support the all-to-all.
    """
    mode = config.experts.a2a_mode
    if is_fused(config):
        return check_fused_dispatch(config, model_config, traits)
    if not traits.shares_steps:
        raise ConfigError(
            f"--moe-a2a-backend {config.experts.a2a}: rows go to the ranks of their experts on "
            f"CPUs, CUDA devices and Ascend NPUs only, this is {traits.name}",
            hint="leave it out",
        )
    if mode == "normal" or (mode == "auto" and traits.dispatch is None):
        return
    if traits.dispatch is None:
        raise ConfigError(
            f"{_MODE} {mode}: {traits.name} has no exchanges of a fixed size",
            hint=f"give {_MODE} normal",
        )
    if why := _obstacle(config, model_config, traits):
        raise ConfigError(f"{_MODE} {mode} on {traits.name}: {why}", hint=f"give {_MODE} normal")


def _obstacle(config: Config, model_config: ModelConfig, traits: Traits) -> str:
    experts, facts, ranks = config.experts, model_config.experts, config.parallel.ep
    assert facts is not None and traits.dispatch is not None
    if why := _incompatible_feature(config):
        return why
    width = facts.latent or model_config.hidden_size
    size = (experts.a2a_tokens, width, facts.per_token, ranks, facts.count)
    if why := traits.dispatch.obstacle(*size):
        bound = f"; {LIMIT} is {experts.a2a_tokens}"
        return why + (bound if experts.a2a_tokens > traits.dispatch.tokens else "")
    needed = -(-traits.dispatch.buffer_bytes(*size) // _MIB)
    message = "rows of %d tokens a rank travel at once over %d ranks, which needs a buffer of %d MB"
    log.info(message, experts.a2a_tokens, ranks, needed)
    return ""


def _incompatible_feature(config: Config) -> str:
    """A feature that is incompatible with an all-to-all of fixed size; "" if there is none."""
    if are_placed(config):
        return "experts that move or have copies are sent by their counts only"
    if EXPERTS in config.lora.kinds:
        return "experts with adapters are sent by their counts only"
    if config.parallel.cp > 1:
        return "the shares of a divided step are not of one size"
    return ""


def device_number(device: DeviceConfig, parallel: ParallelConfig, place: int) -> int:
    """The device number of a rank: devices are assigned in order of replicas, then ranks.

    Args:
        place: index of the rank among the ranks of its replica on this machine.
    """
    mine = parallel.local_replica * parallel.local_world + place
    return device.first_number + mine * device.number_step


def is_placed(device: DeviceConfig) -> bool:
    """Whether each rank is restricted to its own cores."""
    return bool(device.numa_nodes) or device.pins_cores


def place_rank(
    device: DeviceConfig, parallel: ParallelConfig, place: int, root: Path = Path("/")
) -> None:
    """Restrict the calling thread, and threads that it starts, to the cores of one rank.

    Args:
        place: index of the rank among the ranks of its replica on this machine.
        root: folder that contains sys/; for tests.

    Raises:
        ConfigError: the NUMA node does not exist, or has too few usable cores for its ranks.
    """
    if not is_placed(device):
        return
    here = parallel.local_world
    mine = parallel.local_replica * here + place
    nodes = _nodes(device.numa_nodes, parallel.local_replicas * here)
    sharers = [place for place, node in enumerate(nodes) if node == nodes[mine]]
    cores = _cores_of(nodes[mine], root)
    if len(cores) < len(sharers):
        where = "this machine" if nodes[mine] is None else f"node {nodes[mine]}"
        raise ConfigError(
            f"{len(cores)} cores of {where} cannot be shared by {len(sharers)} ranks",
            hint="lower --tp or --dp, or name more nodes with --numa-node",
        )
    at, count = sharers.index(mine), len(sharers)
    own = cores[len(cores) * at // count : len(cores) * (at + 1) // count]
    os.sched_setaffinity(0, own)
    log.info("rank=%d runs on cores %s", mine, ",".join(map(str, own)))


def _nodes(given: tuple[int, ...], ranks: int) -> list[int | None]:
    """The NUMA node of each rank; None for any."""
    if len(given) not in (0, 1, ranks):
        raise ConfigError(
            f"--numa-node names {len(given)} nodes for {ranks} ranks",
            hint="name one node for all of them, or one for each",
        )
    return list(given) if len(given) == ranks else [given[0] if given else None] * ranks


def _cores_of(node: int | None, root: Path) -> list[int]:
    """Cores of the NUMA node that this process may use, in order."""
    available = available_cores()
    if node is None:
        return available
    folder = root / "sys/devices/system/node"
    known = sorted(int(path.name[4:]) for path in folder.glob("node[0-9]*"))
    if node not in known:
        raise ConfigError(
            f"--numa-node {node} does not exist on this machine",
            hint=f"its nodes: {', '.join(map(str, known)) or 'none'}",
        )
    cores: set[int] = set()
    for part in (folder / f"node{node}" / "cpulist").read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores |= set(range(int(first), int(last or first) + 1))
    return sorted(cores.intersection(available))
