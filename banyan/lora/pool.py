"""LoRAPool: the adapters that are loaded on one rank, by number. The scheduler
(`lora/scheduling.py`) decides which adapters are loaded and when."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.config.schema import LoraConfig
from banyan.hub.catalogue import megabytes
from banyan.layers.build import Build
from banyan.lora.adapter_config import CONFIG, EXPANSION, ROUTER, WEIGHTS
from banyan.lora.adapter_files import AdapterPlace, named_adapters
from banyan.lora.load import Base, LoadedAdapter, base_of, load_adapter
from banyan.lora.targets import GAINS, LoRATargets, StackLayout
from banyan.messages.control_ops import ControlOp, DropAdapter, TakeAdapter
from banyan.models.base import Model
from banyan.ops.host_memory import HUGE_PAGE, Arena
from banyan.ops.lora import PlacedExperts, PlacedParts, RowPart
from banyan.parallel.groups import Group
from banyan.platform.base import Traits
from banyan.runner.control_ops import Alike, Finish, NoRoom, PrepareOp, RankReply

log = logger(__name__)

Stream = Callable[[], AbstractContextManager[object]]
_KIB, _GIB = 1 << 10, 1 << 30
_STACKED = (EXPANSION, ROUTER)
"""Kinds of changes besides plain projections that devices support too."""


def open_lora_targets(
    lora: LoraConfig,
    traits: Traits,
    is_rounded: bool = False,
    keeps_parts: bool = True,
    stacked: StackLayout | None = None,
) -> LoRATargets | None:
    """Create the tables for the model that is loaded next; None without --enable-lora.

    Args:
        is_rounded: the model multiplies rounded activations with quantised weights.
        keeps_parts: as for AdapterTable.
        stacked: layout of the tables on a device other than the host.

    Raises:
        ConfigError: the device does not support adapters, or not this kind.
    """
    if not lora.is_enabled:
        return None
    sizes = (lora.max_rank, lora.max_loaded, lora.targets, lora.kinds)
    if traits.is_host:
        return LoRATargets(*sizes, is_rounded=is_rounded, keeps_parts=keeps_parts)
    if not traits.stacks_adapters:
        raise ConfigError(
            f"--enable-lora on {traits.name}: adapters are not computed there",
            hint="merge the adapter into the weights, or use --device cpu",
        )
    if others := [kind for kind in lora.kinds if kind not in _STACKED]:
        raise ConfigError(
            f"adapters of {', '.join(others)} on {traits.name}: projections, "
            f"{' and '.join(_STACKED)} are computed there",
            hint="leave them out of --lora-paths and --lora-target-modules, or use --device cpu",
        )
    return LoRATargets(*sizes, stacked=stacked)


def open_lora_pool(
    lora: LoraConfig, model: Model, build: Build, stream: Stream = nullcontext
) -> "LoRAPool | None":
    """Open the pool of one rank and load the adapters of --lora-paths; None without LoRA. All ranks
    must call this.

    Args:
        stream: as for LoRAPool.

    Raises:
        ConfigError: an adapter cannot be served or does not fit the model.
    """
    if build.adapters is None:
        return None
    lora_pool = LoRAPool(base_of(model, build.adapters), stream)
    if lora_pool.laid_out_bytes:
        _check_preallocated(lora, lora_pool.laid_out_bytes)
    places = named_adapters(lora.paths)
    lora_pool.load_first(places)
    lora_pool.check_ranks_agree(places, build.groups.everyone, build.device)
    return lora_pool


def _check_preallocated(lora: LoraConfig, size_bytes: int) -> None:
    """ConfigError if preallocated tables are larger than --lora-memory-gib."""
    most = int(lora.memory_gib * _GIB)
    capacity = f"{lora.max_loaded} adapters of rank {lora.max_rank} have {megabytes(size_bytes)}"
    log.info("%s on the device, laid out at the start", capacity)
    if 0 < most < size_bytes:
        raise ConfigError(
            f"{capacity} on a rank, laid out at the start, and --lora-memory-gib allows "
            f"{megabytes(most)}",
            hint="lower --max-loaded-loras or --max-lora-rank, or name fewer --lora-target-modules",
        )


class LoRAPool:
    """The adapters of one rank.

    Args:
        base: the model that adapters must fit, with the tables that its layers read.
        stream: the stream that orders the steps of the device; matrices are copied in order with
            them.
    """

    def __init__(self, base: Base, stream: Stream = nullcontext) -> None:
        self._base = base
        self._stream = stream
        self.lora_targets = base.lora_targets
        self._ranks: dict[int, int] = {}
        """Number -> rank of each loaded adapter."""
        self.first: list[FirstLoad] = []
        """The adapters of --lora-paths."""
        self._read: _Read | None = None
        """The adapter that was read last and has not been loaded for lack of memory, so that it is
        read only once."""

    def load_first(self, places: Sequence[AdapterPlace]) -> None:
        """Load the adapters of --lora-paths as numbers 1, 2 …

        Raises:
            ConfigError: one cannot be served or does not fit the model.
        """
        for number, place in enumerate(places, 1):
            loaded = load_adapter(place.path, self._base)
            placed = self._place(loaded)
            self._enter(number, placed)
            self.first.append(FirstLoad(loaded.digest, placed.size_bytes))
            log.info(
                "adapter=%s rank=%d memory=%s path=%s",
                place.name,
                loaded.rank,
                megabytes(placed.size_bytes),
                printable(place.path, 200),
            )

    def check_ranks_agree(
        self, places: Sequence[AdapterPlace], ranks: Group, device: torch.device
    ) -> None:
        """Set the sizes of the first adapters to the largest of all ranks. All ranks must call
        this.

        Raises:
            ConfigError: the files of an adapter differ between ranks.
        """
        if ranks.size == 1 or not self.first:
            return
        own = [(first.size_bytes / _KIB, *bytes.fromhex(first.digest)) for first in self.first]
        mine = torch.tensor(own, device=device).view(1, -1)  # bytes are exact in any float
        gathered = ranks.all_gather(mine, mine.numel() * ranks.size)
        every = gathered.view(ranks.size, len(own), -1).cpu()  # sync: once
        for place, odd in zip(places, (every != every[0])[:, :, 1:].any(2).T, strict=True):
            if odd.any():
                raise ConfigError(
                    f"the adapter at {printable(place.path, 200)!r} is another one for rank "
                    f"{int(odd.nonzero()[0])} than for rank 0",
                    hint="copy its folder to the same path on every node",
                )
        sizes = [int(size * _KIB) for size in every[:, :, 0].amax(0).tolist()]
        pairs = zip(self.first, sizes, strict=True)
        self.first = [first._replace(size_bytes=size) for first, size in pairs]

    @property
    def laid_out_bytes(self) -> int:
        """Bytes that are preallocated on the device for all adapters; 0 if memory is allocated per
        adapter."""
        return self.lora_targets.stacked_bytes

    def has(self, number: int) -> bool:
        return number in self._ranks

    def prepare_load(self, order: ControlOp) -> Finish:
        """Read an adapter; the result loads it between two steps.

        Raises:
            ConfigError: the adapter cannot be served, does not fit, or its files have changed.
            NoRoom: it needs more memory than it may use.
        """
        assert isinstance(order, TakeAdapter)
        if order.number in self._ranks or not 1 <= order.number <= self.lora_targets.capacity:
            raise ConfigError(
                f"adapter {order.number} of {self.lora_targets.capacity} cannot be taken"
            )
        self._read = read = self._read_again(order) or self._read_anew(order)
        size = read.placed.size_bytes
        if 0 <= order.room_bytes < size:
            raise NoRoom(
                f"the adapter takes {megabytes(size)} of memory, and there are "
                f"{megabytes(order.room_bytes)} for it",
                size,
            )

        def load() -> RankReply:
            self._read = None
            with self._stream():
                self._enter(order.number, read.placed)
            return RankReply("The adapter has been loaded.", read.digest.encode(), size)

        path = printable(order.path, 200)
        return Alike(load, f"the adapter at {path!r}", read.digest.encode())

    def _read_again(self, order: TakeAdapter) -> "_Read | None":
        """The adapter that was read last and not loaded, if its files are unchanged and it is the
        one that is loaded now."""
        read, self._read = self._read, None
        if read is None or order.digest not in ("", read.digest):
            return None
        return read if read.files and read.files == _file_states(order.path) else None

    def _read_anew(self, order: TakeAdapter) -> "_Read":
        files = _file_states(order.path)
        loaded = load_adapter(order.path, self._base)
        if order.digest and loaded.digest != order.digest:
            raise ConfigError(
                f"the adapter at {printable(order.path, 200)!r} is not what it was when it was "
                "named",
                hint="POST /unload_lora_adapter, then /load_lora_adapter",
            )
        return _Read(files, loaded.digest, self._place(loaded))

    def prepare_unload(self, order: ControlOp) -> Finish:
        assert isinstance(order, DropAdapter)

        def unload() -> RankReply:
            self._ranks.pop(order.number, None)
            with self._stream():
                for table in self.lora_targets.tables.values():
                    table.enter(order.number, ())
            for rows in self.lora_targets.rows.values():
                rows.enter(order.number, None)
            for experts in self.lora_targets.experts.values():
                experts.enter(order.number, {})
            return RankReply("The adapter has been unloaded.")

        return unload

    def guard_weight_update(self, update_weights: PrepareOp) -> PrepareOp:
        """Wrap a weight update so that it fails if loaded adapters depend on the first weights
        (DoRA)."""

        def prepare(order: ControlOp) -> Finish:
            if GAINS in self.lora_targets.kinds:
                raise ConfigError(
                    "weights cannot be updated while DoRA adapters are served: their scales are "
                    "computed from the weights of the start",
                    hint="restart with the new weights",
                )
            return update_weights(order)

        return prepare

    def _place(self, loaded: LoadedAdapter) -> "_Placed":
        """Copy an adapter to where kernels read it, without a number yet."""
        arena, lora_targets = Arena(HUGE_PAGE), self.lora_targets
        parts = {
            name: lora_targets.tables[name].place(its, arena) for name, its in loaded.parts.items()
        }
        experts = {
            n: lora_targets.experts[n].place(its, arena) for n, its in loaded.experts.items()
        }
        loose = [*parts.values(), *experts.values()]
        size = arena.size_bytes + sum(placed.loose_bytes for placed in loose)
        if self.laid_out_bytes:  # also of projections that it has nothing for
            size = self.laid_out_bytes // lora_targets.capacity
        size += sum(rows.size_bytes for rows in loaded.rows.values())
        return _Placed(parts, experts, loaded.rows, loaded.rank, size)

    def _enter(self, number: int, placed: "_Placed") -> None:
        for name, table in self.lora_targets.tables.items():
            table.enter(number, placed.parts.get(name, ()))
        for name, rows in self.lora_targets.rows.items():
            rows.enter(number, placed.rows.get(name))
        for name, experts in self.lora_targets.experts.items():
            experts.enter(number, placed.experts.get(name, {}))
        self._ranks[number] = placed.rank


class FirstLoad(NamedTuple):
    """Result of loading one adapter of --lora-paths."""

    digest: str
    size_bytes: int


@dataclass(frozen=True)
class _Placed:
    """An adapter in memory, by projection.

    Attributes:
        size_bytes: all of it on this rank.
    """

    parts: Mapping[str, PlacedParts]
    experts: Mapping[str, PlacedExperts]
    rows: Mapping[str, RowPart]
    rank: int
    size_bytes: int


_FileStates = tuple[tuple[str, int, int, int], ...]
"""Path, inode, size and modification time of each file of an adapter."""


@dataclass(frozen=True)
class _Read:
    """An adapter that has been read and has no number yet."""

    files: _FileStates
    digest: str
    placed: _Placed


def _file_states(path: str) -> _FileStates:
    """State of the files before they are read; () if one is missing."""
    names = [path] if os.path.isfile(path) else [os.path.join(path, n) for n in (CONFIG, WEIGHTS)]
    try:
        found = [(name, os.stat(name)) for name in names]
    except OSError:
        return ()
    return tuple((name, at.st_ino, at.st_size, at.st_mtime_ns) for name, at in found)
