"""LoRAPool: the adapters that one rank holds, by their number. Knows files and tensors; which
adapters there are and when one comes or goes is the engine's business.
"""

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
from banyan.lora.targets import GAINS, LoRATargets, Stacked
from banyan.messages.control_ops import ControlOp, DropAdapter, TakeAdapter
from banyan.models.base import Model
from banyan.ops.arena import HUGE_PAGE, Arena
from banyan.ops.lora import PlacedParts
from banyan.ops.lora_experts import PlacedExperts
from banyan.ops.lora_rows import RowPart
from banyan.parallel.groups import Group
from banyan.platform.base import Traits
from banyan.runner.control_ops import Alike, Finish, NoRoom, PrepareOp, RankReply

log = logger(__name__)

Stream = Callable[[], AbstractContextManager[object]]
_KIB, _GIB = 1 << 10, 1 << 30
_STACKED = (EXPANSION, ROUTER)
"""Kinds of changes beside those of projections that devices compute too."""


def open_lora_targets(
    lora: LoraConfig,
    traits: Traits,
    is_rounded: bool = False,
    keeps_parts: bool = True,
    stacked: Stacked | None = None,
) -> LoRATargets | None:
    """What adapters lie in beside the model that is loaded next; None where none are asked for.

    Args:
        is_rounded: the model multiplies rounded activations with quantised weights.
        keeps_parts: as for AdapterTable.
        stacked: how they lie on a device that is not the host.

    Raises:
        ConfigError: the device cannot compute them.
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
            f"adapters of {', '.join(others)} on {traits.name}: those of projections, "
            f"{' and '.join(_STACKED)} are computed there",
            hint="leave them out of --lora-paths and --lora-target-modules, or use --device cpu",
        )
    return LoRATargets(*sizes, stacked=stacked)


def open_lora_pool(
    lora: LoraConfig, model: Model, build: Build, stream: Stream = nullcontext
) -> "LoRAPool | None":
    """The rack of one rank with the adapters of the start; None where there is no room for any. All
    ranks must call this.

    Args:
        stream: as for LoRAPool.

    Raises:
        ConfigError: one of them cannot be served, or does not fit.
    """
    if build.adapters is None:
        return None
    lora_pool = LoRAPool(base_of(model, build.adapters), stream)
    if lora_pool.laid_out_bytes:
        _check_the_room(lora, lora_pool.laid_out_bytes)
    places = named_adapters(lora.paths)
    lora_pool.take_first(places)
    lora_pool.agree(places, build.groups.everyone, build.device)
    return lora_pool


def _check_the_room(lora: LoraConfig, size_bytes: int) -> None:
    """ConfigError where tables that are laid out at the start are larger than adapters may be."""
    most = int(lora.memory_gib * _GIB)
    room = f"{lora.max_loaded} adapters of rank {lora.max_rank} have {megabytes(size_bytes)}"
    log.info("%s on the device, laid out at the start", room)
    if 0 < most < size_bytes:
        raise ConfigError(
            f"{room} on a rank, laid out at the start, and --lora-memory-gib allows "
            f"{megabytes(most)}",
            hint="lower --max-loaded-loras or --max-lora-rank, or name fewer --lora-target-modules",
        )


class LoRAPool:
    """
    Args:
        base: what adapters must fit, and the tables that its projections read.
        stream: what steps of the device are ordered by; matrices are put there in their turn.
    """

    def __init__(self, base: Base, stream: Stream = nullcontext) -> None:
        self._base = base
        self._stream = stream
        self.lora_targets = base.lora_targets
        self._ranks: dict[int, int] = {}
        """Number -> rank, of those that are there."""
        self.first: list[FirstLoad] = []
        """The adapters of the start."""
        self._read: _Read | None = None
        """What waits for room, so that it is read once."""

    def take_first(self, places: Sequence[AdapterPlace]) -> None:
        """Load the adapters of the start as 1, 2 …

        Raises:
            ConfigError: one cannot be served, or does not fit.
        """
        for number, place in enumerate(places, 1):
            loaded = load_adapter(place.path, self._base)
            placed = self._place(loaded)
            self._enter(number, placed)
            self.first.append(FirstLoad(loaded.digest, placed.size_bytes))
            log.info(
                "adapter=%s rank=%d memory=%s path=%s",
                *(place.name, loaded.rank, megabytes(placed.size_bytes)),
                printable(place.path, 200),
            )

    def agree(self, places: Sequence[AdapterPlace], ranks: Group, device: torch.device) -> None:
        """Let the sizes of the adapters of the start be those of the rank where they are largest.
        All ranks must call this.

        Raises:
            ConfigError: the files of one are not the same for all ranks.
        """
        if ranks.size == 1 or not self.first:
            return
        own = [(first.size_bytes / _KIB, *bytes.fromhex(first.digest)) for first in self.first]
        told = torch.tensor(own, device=device).view(1, -1)  # bytes are exact in any float
        all_told = ranks.all_gather(told, told.numel() * ranks.size)
        every = all_told.view(ranks.size, len(own), -1).cpu()  # sync: once
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
        """What all that may be loaded have on the device from the start on; 0 where memory is taken
        as they come."""
        return self.lora_targets.stacked_bytes

    def has(self, number: int) -> bool:
        return number in self._ranks

    def prepare_take(self, order: ControlOp) -> Finish:
        """
        Raises:
            ConfigError: the adapter cannot be served, does not fit, or is not what it was.
            NoRoom: it needs more memory than it may have.
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

        def take() -> RankReply:
            self._read = None
            with self._stream():
                self._enter(order.number, read.placed)
            return RankReply("The adapter has been loaded.", read.digest.encode(), size)

        path = printable(order.path, 200)
        return Alike(take, f"the adapter at {path!r}", read.digest.encode())

    def _read_again(self, order: TakeAdapter) -> "_Read | None":
        """What was read last and not taken, for want of room here or on another rank, if it is what
        is to be taken now; else it goes before another one is read."""
        read, self._read = self._read, None
        if read is None or order.digest not in ("", read.digest):
            return None
        return read if read.stamp and read.stamp == _stamp_of(order.path) else None

    def _read_anew(self, order: TakeAdapter) -> "_Read":
        stamp = _stamp_of(order.path)
        loaded = load_adapter(order.path, self._base)
        if order.digest and loaded.digest != order.digest:
            raise ConfigError(
                f"the adapter at {printable(order.path, 200)!r} is not what it was when it was "
                "named",
                hint="POST /unload_lora_adapter, then /load_lora_adapter",
            )
        return _Read(stamp, loaded.digest, self._place(loaded))

    def prepare_drop(self, order: ControlOp) -> Finish:
        assert isinstance(order, DropAdapter)

        def drop() -> RankReply:
            self._ranks.pop(order.number, None)
            with self._stream():
                for table in self.lora_targets.tables.values():
                    table.enter(order.number, ())
            for rows in self.lora_targets.rows.values():
                rows.enter(order.number, None)
            for experts in self.lora_targets.experts.values():
                experts.enter(order.number, {})
            return RankReply("The adapter has been unloaded.")

        return drop

    def beside(self, take_weights: PrepareOp) -> PrepareOp:
        """What takes other weights, where adapters do not depend on those of the start."""

        def prepare(order: ControlOp) -> Finish:
            if GAINS in self.lora_targets.kinds:
                raise ConfigError(
                    "other weights are not taken where DoRA adapters are served: what scales their "
                    "outputs is made of the weights of the start",
                    hint="start again with the other weights",
                )
            return take_weights(order)

        return prepare

    def _place(self, loaded: LoadedAdapter) -> "_Placed":
        """Put an adapter where kernels read it, under no number yet."""
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
    """What came of loading an adapter of the start."""

    digest: str
    size_bytes: int


@dataclass(frozen=True)
class _Placed:
    """An adapter in memory, by projection.

    Attributes:
        size_bytes: of all of it on this rank.
    """

    parts: Mapping[str, PlacedParts]
    experts: Mapping[str, PlacedExperts]
    rows: Mapping[str, RowPart]
    rank: int
    size_bytes: int


_Stamp = tuple[tuple[str, int, int, int], ...]
"""Of each file of an adapter: its path, number, size and time of change."""


@dataclass(frozen=True)
class _Read:
    """An adapter that has been read and has no number yet."""

    stamp: _Stamp
    digest: str
    placed: _Placed


def _stamp_of(path: str) -> _Stamp:
    """As files were before they are read; () where there is none."""
    names = [path] if os.path.isfile(path) else [os.path.join(path, n) for n in (CONFIG, WEIGHTS)]
    try:
        found = [(name, os.stat(name)) for name in names]
    except OSError:
        return ()
    return tuple((name, at.st_ino, at.st_size, at.st_mtime_ns) for name, at in found)
