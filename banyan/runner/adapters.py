"""AdapterRack: the adapters that one rank holds, by their number. Knows files and tensors; which
adapters there are and when one comes or goes is the engine's business.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.config.adapter_card import CONFIG, WEIGHTS
from banyan.config.adapters import AdapterPlace, named_adapters
from banyan.config.catalogue import megabytes
from banyan.config.schema import LoraConfig
from banyan.layers.build import Build
from banyan.layers.seats import GAINS, AdapterSeats
from banyan.messages.orders import DropAdapter, Order, TakeAdapter
from banyan.models.base import Model
from banyan.models.weights.adapters import Base, LoadedAdapter, base_of, load_adapter
from banyan.ops.adapter_rows import RowPart
from banyan.ops.adapters import AdapterTokens, PlacedParts
from banyan.ops.arena import HUGE_PAGE, Arena
from banyan.ops.expert_adapters import PlacedExperts
from banyan.parallel.groups import Group, Groups
from banyan.platform.base import Traits
from banyan.runner.orders import Alike, Carrier, Finish, NoRoom, Said

log = logger(__name__)

_KIB = 1 << 10


def open_seats(
    lora: LoraConfig, traits: Traits, is_rounded: bool = False, keeps_parts: bool = True
) -> AdapterSeats | None:
    """What adapters lie in beside the model that is loaded next; None where none are asked for.

    Args:
        is_rounded: the model multiplies rounded activations with quantised weights.
        keeps_parts: as for AdapterTable.

    Raises:
        ConfigError: the device cannot compute them.
    """
    if not lora.is_enabled:
        return None
    if not traits.is_host:
        raise ConfigError(
            f"--enable-lora on {traits.name}: adapters are computed on CPUs only",
            hint="merge the adapter into the weights, or use --device cpu",
        )
    sizes = (lora.max_rank, lora.max_loaded, lora.targets, lora.kinds)
    return AdapterSeats(*sizes, is_rounded=is_rounded, keeps_parts=keeps_parts)


def open_rack(lora: LoraConfig, model: Model, build: Build) -> "AdapterRack | None":
    """The rack of one rank with the adapters of the start; None where there is no room for any. All
    ranks must call this.

    Raises:
        ConfigError: one of them cannot be served, or does not fit.
    """
    if build.adapters is None:
        return None
    rack = AdapterRack(base_of(model, build.adapters))
    places = named_adapters(lora.paths)
    rack.take_first(places)
    rack.agree(places, build.groups.everyone, build.device)
    return rack


class AdapterRack:
    """
    Args:
        base: what adapters must fit, and the tables that its projections read.
    """

    def __init__(self, base: Base) -> None:
        self._base = base
        self.seats = base.seats
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

    def has(self, number: int) -> bool:
        return number in self._ranks

    def prepare_take(self, order: Order) -> Finish:
        """
        Raises:
            ConfigError: the adapter cannot be served, does not fit, or is not what it was.
            NoRoom: it needs more memory than it may have.
        """
        assert isinstance(order, TakeAdapter)
        if order.number in self._ranks or not 1 <= order.number <= self.seats.capacity:
            raise ConfigError(f"adapter {order.number} of {self.seats.capacity} cannot be taken")
        self._read = read = self._read_again(order) or self._read_anew(order)
        size = read.placed.size_bytes
        if 0 <= order.room_bytes < size:
            raise NoRoom(
                f"the adapter takes {megabytes(size)} of memory, and there are "
                f"{megabytes(order.room_bytes)} for it",
                size,
            )

        def take() -> Said:
            self._read = None
            self._enter(order.number, read.placed)
            return Said("The adapter has been loaded.", read.digest.encode(), size)

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

    def prepare_drop(self, order: Order) -> Finish:
        assert isinstance(order, DropAdapter)

        def drop() -> Said:
            self._ranks.pop(order.number, None)
            for table in self.seats.tables.values():
                table.enter(order.number, ())
            for rows in self.seats.rows.values():
                rows.enter(order.number, None)
            for experts in self.seats.experts.values():
                experts.enter(order.number, {})
            return Said("The adapter has been unloaded.")

        return drop

    def beside(self, take_weights: Carrier) -> Carrier:
        """What takes other weights, where adapters do not depend on those of the start."""

        def prepare(order: Order) -> Finish:
            if GAINS in self.seats.kinds:
                raise ConfigError(
                    "other weights are not taken where DoRA adapters are served: what scales their "
                    "outputs is made of the weights of the start",
                    hint="start again with the other weights",
                )
            return take_weights(order)

        return prepare

    def _place(self, loaded: LoadedAdapter) -> "_Placed":
        """Put an adapter where kernels read it, under no number yet."""
        arena, seats = Arena(HUGE_PAGE), self.seats
        parts = {name: seats.tables[name].place(its, arena) for name, its in loaded.parts.items()}
        experts = {n: seats.experts[n].place(its, arena) for n, its in loaded.experts.items()}
        loose = [*parts.values(), *experts.values()]
        size = arena.size_bytes + sum(placed.loose_bytes for placed in loose)
        size += sum(rows.size_bytes for rows in loaded.rows.values())
        return _Placed(parts, experts, loaded.rows, loaded.rank, size)

    def _enter(self, number: int, placed: "_Placed") -> None:
        for name, table in self.seats.tables.items():
            table.enter(number, placed.parts.get(name, ()))
        for name, rows in self.seats.rows.items():
            rows.enter(number, placed.rows.get(name))
        for name, experts in self.seats.experts.items():
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


class StepAdapters:
    """Which tokens of a step have which adapter, in memory that stays where it is.

    Args:
        max_tokens, max_outputs: of the largest step.
        sharers: replicas or shares whose rows layers gather.
    """

    def __init__(self, max_tokens: int, max_outputs: int, sharers: int) -> None:
        self.own = AdapterTokens(max_tokens)
        self.gathered = AdapterTokens(max_tokens * sharers) if sharers > 1 else None
        self.outputs = AdapterTokens(max_outputs)


class AdapterSlots:
    """The adapter of each slot.

    Args:
        slots: how many there are, padding included.
        groups: of this rank.
    """

    def __init__(self, slots: int, rack: AdapterRack, groups: Groups) -> None:
        self._numbers = np.zeros(slots, np.int64)
        self._of_step = self._numbers
        """Of each token of the step at hand; of a divided one of all shares."""
        self._rack = rack
        self._replicas: Group | None = None
        """Whose rows are gathered from step to step."""
        self._sharers = 1
        if groups.joint is not None:
            self._replicas = groups.everyone.of_rows(groups.joint.tokens)
            self._sharers = groups.joint.replicas
        if groups.divided is not None:
            self._sharers = groups.divided.replicas

    def problem(self, number: int) -> str:
        """Why a slot cannot have this adapter; "" when it can."""
        if not number or self._rack.has(number):
            return ""
        return f"the request wants adapter {number}, which is not loaded"

    def enter(self, slot: int, number: int) -> None:
        self._numbers[slot] = number

    def room(self, max_tokens: int, max_outputs: int) -> StepAdapters:
        """For steps of that size."""
        return StepAdapters(max_tokens, max_outputs, self._sharers)

    def show(self, step: StepAdapters) -> None:
        """Let what is computed or recorded next read these."""
        seats = self._rack.seats
        seats.tokens, seats.gathered = step.own, step.gathered

    def fill(self, step: StepAdapters, slots: np.ndarray, of_all: np.ndarray | None) -> None:
        """Enter a step, at the same time as the other replicas that work on it.

        Args:
            slots: [tokens], of each token.
            of_all: of those of all shares, where it is divided.
        """
        mine = self._numbers[slots]
        self._of_step = mine if of_all is None else self._numbers[of_all]
        step.own.fill(mine)
        self.show(step)
        if step.gathered is None:
            return
        everyone = self._of_step
        if self._replicas is not None:
            told = self._replicas.gather_rows(torch.from_numpy(mine).unsqueeze(1))
            everyone = told.flatten().numpy()
        has_room = len(everyone) <= len(step.gathered.order)
        gathered = step.gathered if has_room else AdapterTokens(len(everyone))
        gathered.fill(everyone)
        self._rack.seats.gathered = gathered

    def turn_to(self, slots: np.ndarray) -> None:
        """Let `choose` be of a step that was entered before. slots: [tokens], as for `fill`."""
        self._of_step = self._numbers[slots]

    @property
    def has_outputs(self) -> bool:
        """Logits depend on adapters of their own."""
        return self._rack.seats.has_outputs

    def show_outputs(self, outputs: AdapterTokens) -> None:
        """Let logits that are made or recorded next read these."""
        self._rack.seats.outputs = outputs

    def choose(self, outputs: AdapterTokens, chosen: np.ndarray) -> None:
        """chosen: [n], tokens of the step whose logits are wanted."""
        outputs.fill(self._of_step[chosen])
        self.show_outputs(outputs)
