"""How a runner goes through a model: the quickest way that its ops and its device allow, for steps
of the sizes that it holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from banyan.base.log import logger
from banyan.context_parallel.forward import ContextParallelForward, GatheredAttention
from banyan.context_parallel.split import share_capacity
from banyan.layers.build import Build
from banyan.layers.indexer import index_shape
from banyan.models.base import Model
from banyan.ops.api import NotRecordable, Ops
from banyan.ops.bind import BoundOps
from banyan.platform.base import BY_SHAPE, Platform
from banyan.runner.attention.base import AttentionBackend
from banyan.runner.batch import Batch
from banyan.runner.captured_forward import CapturedForward
from banyan.runner.forward import EagerForward, Forward, RecordedForward
from banyan.runner.inputs import StepTensors
from banyan.runner.kvstore import GroupLayout, KVStore
from banyan.runner.rank_page_access import RankAddress
from banyan.runner.slots import SlotTable

log = logger(__name__)


@dataclass(frozen=True)
class RunnerConfig:
    """How much the runner holds.

    Attributes:
        max_slots: slots are numbered 1 … max_slots; 0 is padding.
        max_length: longest request in tokens, prompt and output.
        groups: cache groups, in the order of the plans' group numbers.
        max_tokens: tokens of the largest step that is worth recording.
        shapes: rows of the decode steps to capture, where steps are captured by shape.
        is_unpadded: steps of other numbers of rows are launched anew.
        attention: name of the attention backend; "" = what the model takes.
        draft_room: drafts that one step verifies at most, beside the tokens of its rows.
        verified: tokens of a row with all the drafts that it may have; 0 = rows have none.
        shares_pages: rank 0 moves the pages of all ranks, and reads and writes them where they are.
        places: where ranks of other machines bring theirs, by rank.
        burst: decode steps that one plan may hold.
        carried: width of what comes with each token beside its id, 0 = nothing.
        taps: layers whose inputs are kept of each step.
        branching: longest path of drafts that branch, from the newest token on; 0 = none do.
        reads_all: more is read of every token than of outputs alone: hidden states, or choices of
            experts, by one rank at least.
    """

    max_slots: int
    max_length: int
    groups: tuple[GroupLayout, ...]
    max_tokens: int = 0
    shapes: tuple[int, ...] = ()
    is_unpadded: bool = False
    attention: str = ""
    draft_room: int = 0
    verified: int = 0
    shares_pages: bool = False
    places: Mapping[int, RankAddress] = field(default_factory=dict[int, RankAddress])
    multi_step: int = 1
    carried: int = 0
    taps: tuple[int, ...] = ()
    branching: int = 0
    reads_all: bool = False


def open_forward(
    model: Model,
    table: SlotTable,
    store: KVStore,
    build: Build,
    sizes: RunnerConfig,
    attention: AttentionBackend,
    platform: Platform,
) -> Forward:
    """The quickest way through the model that its ops and its device allow."""
    divided = build.groups.divided
    if divided is None:
        return _open(model, table, store, build, sizes, attention, platform)
    attention = GatheredAttention(attention, build.groups.context)
    inner = _open(model, table, store, build, sizes, attention, platform)
    return ContextParallelForward(inner, divided)


def _open(
    model: Model,
    table: SlotTable,
    store: KVStore,
    build: Build,
    sizes: RunnerConfig,
    attention: AttentionBackend,
    platform: Platform,
) -> Forward:
    divided, stages = build.groups.divided, build.groups.stages
    carried = model.model_config.hidden_size if stages.rank else sizes.carried
    outputs = sizes.max_slots + sizes.draft_room
    max_tokens, max_rows = sizes.max_tokens, sizes.max_slots
    shares = 1
    if divided is not None:
        shares = divided.replicas
        max_tokens, max_rows = share_capacity(max_tokens, max_rows, shares, divided.split)

    def tensors(max_tokens: int, max_rows: int, max_outputs: int) -> StepTensors:
        size = (max_tokens, max_rows, max_outputs, carried, build.dtype, sizes.taps, shares)
        more = (sizes.branching, build.adapters is not None)
        return StepTensors(table, store, platform, build.device, *size, *more)

    def larger(batch: Batch) -> StepTensors:
        tokens, rows = batch.largest
        return tensors(tokens, max(max_rows, rows), max(outputs, len(batch.last)))

    # A recording tells its sizes apart by their numbers.
    joint = build.groups.joint or divided
    max_rows += bool(build.groups.joint and sizes.draft_room)  # one of padding for missing drafts
    max_tokens = max(max_tokens, outputs + 1)
    if joint is not None and max_tokens == joint.replicas * outputs:
        max_tokens += 1
    step = tensors(max_tokens, max_rows, outputs)
    prunes_to_outputs = _narrows(model, build, sizes)
    eager = EagerForward(
        model, step, attention, larger, build.device, joint, stages, prunes_to_outputs
    )
    recorder = build.ops.recorder
    try:
        if recorder is not None and sizes.max_tokens:
            return RecordedForward(
                *(eager, model, build.ops, recorder, table, attention, step, joint, stages),
                prunes_to_outputs=prunes_to_outputs,
            )
    except NotRecordable as error:
        log.info("steps are not recorded: %s", error)
    if (
        platform.traits.programs != BY_SHAPE
        or not sizes.shapes
        or model.model_config.pooling is not None
    ):
        return eager
    why = _obstacle(model, build.ops, platform)
    if build.sends_rows and not build.exchanged:
        why = "rows go to the ranks of their experts by counts that the host waits for"
    if sizes.taps or sizes.carried:
        why = "drafts are made of what layers read beside tokens"
    if build.groups.joint is not None and sizes.draft_room:
        why = "joined replicas do not tell each other how many rows have drafts"
    if why:
        log.info("steps are not captured: %s", why)
        return eager
    shapes = sorted({-(-shape // shares) for shape in sizes.shapes})
    shapes = tuple(shape for shape in shapes if shape <= max_rows)
    if build.exchanged:  # others would wait for the counts of their rows
        most = build.exchanged * build.groups.attention.size // max(1, sizes.verified)
        shapes = tuple(shape for shape in shapes if shape <= most)
        max_rows = min(max_rows, most)
    captured = (model, table, store, attention, platform, step, shapes or (max_rows,))
    return CapturedForward(eager, *captured, sizes.is_unpadded, sizes.verified, build.groups)


def _narrows(model: Model, build: Build, sizes: RunnerConfig) -> bool:
    """Whether steps may go on with the tokens of outputs alone behind the last attention. Not where
    replicas or shares of a step go through feed-forward blocks together, adapters are told of all
    tokens, or somebody reads more of each token."""
    groups = build.groups
    is_shared = (groups.joint or groups.divided) is not None
    is_told = build.adapters is not None or sizes.reads_all
    return (
        model.prunes_to_outputs
        and model.model_config.pooling is None
        and not (is_shared or is_told)
    )


def _obstacle(model: Model, ops: Ops, platform: Platform) -> str:
    """Why steps of this model cannot be captured, "" when they can."""
    model_config, traits = model.model_config, platform.traits
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
    if any(not {"k", "latent"} & set(cache.tensors) for cache in model.caches):
        return "attention over this model's cache waits for the device"
    needed = [*attends, *(["experts"] if model_config.experts is not None else [])]
    waiting = [op for op in needed if isinstance(ops, BoundOps) and ops.waits(op)]
    return f"what computes {', '.join(waiting)} waits for the device" if waiting else ""
