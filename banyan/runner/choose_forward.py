"""open_forward: chooses the fastest way through a model that its ops and its device allow."""

from typing import cast

from banyan.base.log import logger
from banyan.context_parallel.forward import (
    ContextParallelForward,
    GatheredAttention,
    share_capacity,
)
from banyan.layers.build import Build
from banyan.layers.latent_attention import index_shape
from banyan.layers.recurrent import INPUTS, MATRIX
from banyan.model_config.media import is_cross
from banyan.model_config.model_config import STATE
from banyan.models.base import Model
from banyan.ops.api import NotRecordable
from banyan.ops.bind import BoundOps
from banyan.platform.base import BY_SHAPE, Platform
from banyan.runner.attention import AttentionBackend
from banyan.runner.batch import Batch
from banyan.runner.captured_forward import CapturedForward, CaptureSizes
from banyan.runner.forward import EagerForward, Forward, ForwardContext
from banyan.runner.inputs import StepSizes, StepTensors
from banyan.runner.kvstore import KVStore
from banyan.runner.prompt_graphs import PromptGraphs
from banyan.runner.recorded_forward import RecordedForward
from banyan.runner.runner_config import RunnerConfig
from banyan.runner.slots import SlotTable

log = logger(__name__)


def open_forward(
    model: Model,
    table: SlotTable,
    store: KVStore,
    build: Build,
    config: RunnerConfig,
    attention: AttentionBackend,
    platform: Platform,
) -> Forward:
    """Recorded if the ops can be recorded, captured if the device has graphs, else eager."""
    context_parallel = build.groups.cp_batch
    if context_parallel is not None:
        attention = GatheredAttention(attention, build.groups.context)
    prunes = _prunes_outputs(model, build, config)
    context = ForwardContext(model, table, store, attention, platform, build, prunes)
    forward = _open(context, config)
    if context_parallel is None:
        return forward
    return ContextParallelForward(forward, context_parallel)


def _open(context: ForwardContext, config: RunnerConfig) -> Forward:
    model, build, platform = context.model, context.build, context.platform
    groups = build.groups
    context_parallel, every = build.groups.cp_batch, context.rows_of_all
    media = model.model_config.media
    carried = model.model_config.hidden_size if build.groups.stages.rank else config.carried
    outputs = config.max_slots + config.draft_room
    max_tokens, max_rows, shares = config.max_tokens, config.max_slots, 1
    if context_parallel is not None:
        shares = context_parallel.replicas
        split = context_parallel.split
        max_tokens, max_rows = share_capacity(max_tokens, max_rows, shares, split)

    def tensors(max_tokens: int, max_rows: int, max_outputs: int) -> StepTensors:
        sizes = StepSizes(
            max_tokens=max_tokens,
            max_rows=max_rows,
            max_outputs=max_outputs,
            carried=carried,
            dtype=build.dtype,
            aux_hidden_layers=config.aux_hidden_layers,
            shares=shares,
            branching=config.branching,
            has_adapters=build.adapters is not None,
            takes_features=model.takes_features
            and not is_cross(media)
            and not build.groups.stages.rank,
            has_axes=media is not None and bool(media.axes),
            sees_ahead=media is not None and media.is_mutual,
        )
        return StepTensors(context.table, context.store, platform, build.device, sizes)

    def larger(batch: Batch) -> StepTensors:
        tokens, rows = batch.largest
        return tensors(tokens, max(max_rows, rows), max(outputs, len(batch.last)))

    max_rows += bool(config.prompt_shapes)  # one more fills a step up
    # With DP attention, missing drafts are replaced by one row of padding.
    max_rows += bool(build.groups.dp_batch and config.draft_room)
    # A recording distinguishes its sizes by their values, so no two may be equal.
    max_tokens = max(max_tokens, outputs + 1)
    if every is not None and max_tokens == every.replicas * outputs:
        max_tokens += 1
    step = tensors(max_tokens, max_rows, outputs)
    eager = EagerForward(context, step, larger)
    recorder = build.ops.recorder
    if recorder is not None and _applies_adapters_in_torch(build):
        log.info("steps are not recorded: torch applies the adapters")
        recorder = None
    try:
        if recorder is not None and config.max_tokens:
            return RecordedForward(
                context, eager, step, recorder, config.shapes, config.is_unpadded
            )
    except NotRecordable as error:
        log.info("steps are not recorded: %s", error)
    has_graphs = platform.traits.programs == BY_SHAPE and bool(config.shapes)
    if not has_graphs or model.model_config.pooling is not None:
        return eager
    if why := _why_not_captured(model, build, config, platform):
        log.info("steps are not captured: %s", why)
        return eager
    shapes = sorted({-(-shape // shares) for shape in config.shapes})
    shapes = tuple(shape for shape in shapes if shape <= max_rows)
    if build.exchanged:  # with more rows than fit the exchange, other ranks wait for row counts
        most = build.exchanged * build.groups.attention.size // max(1, config.verified)
        shapes = tuple(shape for shape in shapes if shape <= most)
        max_rows = min(max_rows, most)
    sizes = CaptureSizes(
        shapes or (max_rows,),
        config.is_unpadded,
        config.verified,
        config.prompt_shapes,
        config.collects_in_capture,
        config.profiles_capture,
    )
    if config.prompt_shapes and (every or groups.stages.size > 1):
        log.info("steps with prompts are not captured: ranks bring different numbers of tokens")
    elif config.prompt_shapes:
        eager.prompts = PromptGraphs(context, step, sizes)
    return CapturedForward(context, eager, step, sizes)


def _applies_adapters_in_torch(build: Build) -> bool:
    """Whether adapters are applied by torch, which a recording of compiled ops does not see."""
    return build.adapters is not None and cast(BoundOps, build.ops).is_reference("adapt")


def _prunes_outputs(model: Model, build: Build, config: RunnerConfig) -> bool:
    """Whether the model may keep only output tokens after the last attention layer.

    Not if replicas or context parallel ranks run feed-forward blocks together, if adapters need
    all tokens, or if something reads every token.
    """
    groups = build.groups
    is_shared = (groups.dp_batch or groups.cp_batch) is not None
    needs_all = build.adapters is not None or config.reads_all
    return (
        model.prunes_to_outputs
        and model.model_config.pooling is None
        and not (is_shared or needs_all)
    )


def _why_not_captured(model: Model, build: Build, config: RunnerConfig, platform: Platform) -> str:
    """Why steps of this runner cannot be captured; "" = they can."""
    if is_cross(model.model_config.media):
        return "each row attends to its own content"
    if build.groups.dp_batch is not None and config.draft_room:
        return "with DP attention, replicas do not exchange how many rows have drafts"
    if config.aux_hidden_layers or config.carried:
        return "the drafter reads auxiliary hidden states"
    if build.watch is not None:
        return "the host reads the choices of experts after each step"
    if build.sends_rows and not build.exchanged:
        return "rows go to the ranks of their experts by counts that the host waits for"
    return _waiting_op(model, build, platform)


def _waiting_op(model: Model, build: Build, platform: Platform) -> str:
    """Which op of this model makes the host wait for the device; "" = none."""
    model_config, traits, ops = model.model_config, platform.traits, build.ops
    latent = model_config.latent
    attends = ["paged_attention"]
    if latent is not None:
        attends = ["latent_attention", *(["choose_positions"] if latent.index_heads else [])]
    if traits.lengths_on_host:
        if latent is not None and latent.index_heads and not ops.joins_index(index_shape(latent)):
            return "the reference chooses what tokens read, and it waits for the device"
        if latent is not None and (latent.rank, latent.rope_dim) not in traits.latents:
            return "attention over this model's cache waits for the device"
        if model_config.attention_cap:
            return "the reference attends, and it waits for the device"
    states = [cache.tensors for cache in model.caches if cache.kind == STATE]
    if INPUTS in set().union(*states):
        attends.append("short_conv")
    widths = {len(tensors[MATRIX].shape) for tensors in states if MATRIX in tensors}
    attends += [op for op, width in (("scan", 3), ("selective_scan", 2)) if width in widths]
    needed = [*attends, *(["experts"] if model_config.experts is not None else [])]
    if build.places is not None:
        needed.append("combine_experts")
    waiting = [op for op in needed if isinstance(ops, BoundOps) and ops.waits(op)]
    return f"{', '.join(waiting)} waits for the device" if waiting else ""
