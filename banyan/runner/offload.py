"""Weights that do not fit: those of some blocks lie in pinned memory of the host, and come to the
device ahead of their turn in each forward pass.

The tensors of such a block are views into one of a few buffers on the device, which the blocks take
in turns. Its addresses never change, so a captured step replays what it has captured: the copies
too, because each pass begins them itself and waits for all of them. Knows no kernels: whatever a
block has packed is found by looking for its tensors.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import cast

import torch
from torch import Tensor, nn

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.schema import DeviceConfig
from banyan.layers.build import Build
from banyan.model_config.model_config import ModelConfig
from banyan.models.base import Model
from banyan.models.decoder import DecoderLM
from banyan.platform.base import Platform, SideStream

log = logger(__name__)

_FLAGS = "--cpu-offload-gb and --offload-group-size"
_GIB = 1 << 30
_ALIGNED = 512
"""Bytes; more than any kernel asks of an address."""
_DEEPEST = 6
"""Objects within objects that hold a layer's weights."""


@dataclass(frozen=True)
class Offload:
    """
    Attributes:
        asked_bytes: device memory that weights give up; 0 where groups say which of them do.
        group, of_group: of so many layers the last ones lie in memory of the host.
        ahead: layers that are on their way while one runs.
    """

    platform: Platform
    asked_bytes: int
    group: int
    of_group: int
    ahead: int

    @property
    def buffers(self) -> int:
        return self.ahead + 1

    def is_of_group(self, layer: int) -> bool:
        """Whether a layer is one of those that groups say."""
        return self.group > 0 and layer % self.group >= self.group - self.of_group


def open_offload(device: DeviceConfig, platform: Platform) -> Offload | None:
    """None where all weights stay where they are."""
    if not device.offload_gib and device.offload_group < 1:
        return None
    if not platform.traits.async_launch:
        log.info(
            "%s have no effect on %s: its weights lie in the memory of the host",
            *(_FLAGS, platform.traits.name),
        )
        return None
    asked = round(device.offload_gib * _GIB)
    group, of_group = device.offload_group, device.offload_of_group
    return Offload(platform, asked, group, of_group, device.offload_ahead)


def not_streamed(model_config: ModelConfig) -> ConfigError:
    """What says so of a model whose blocks are not ours, or none of a decoder."""
    return ConfigError(
        f"{_FLAGS}: layers of {model_config.architecture} are not streamed, those of decoders are",
        hint="leave them out, and --model-impl at auto",
    )


class OffloadedBlocks:
    """What of one model lies in memory of the host. Told of its blocks while they are filled, so
    that the device never holds all of them; `settle` when all are.

    Args:
        build: what layers have in common, which is no block's own.
    """

    def __init__(self, offload: Offload, build: Build) -> None:
        self._offload = offload
        self._platform = offload.platform
        self._build = build
        self._blocks: dict[int, list[nn.Module]] = {}
        """The modules that no other block has, by layer."""
        self._away: dict[int, _Away] = {}

    def begin(self, model: Model) -> None:
        """Look at a model that is still empty.

        Raises:
            ConfigError: it has no blocks that could be streamed.
        """
        if not isinstance(model, DecoderLM):
            raise not_streamed(model.model_config)
        seen = Counter(
            id(module)
            for part in (*model.children(), *model.layers.children())
            if part is not model.layers
            for module in part.modules()
        )
        self._blocks = {
            layer: [part for part in model.layers[layer].modules() if seen[id(part)] == 1]
            for layer in model.stage
        }

    def filled(self, layer: int) -> None:
        """All weights of a block are here."""
        if layer not in self._blocks or not self._goes_now(layer):
            return
        self._take(layer)

    def settle(self, model: Model) -> None:
        """All weights of the model are here: it can run behind this.

        Raises:
            ConfigError: the device would not hold less than without.
        """
        assert isinstance(model, DecoderLM)
        offload = self._offload
        if offload.asked_bytes:
            sizes = {layer: self._size_of(layer) for layer in self._blocks}
            wanted = spread(sizes, offload.asked_bytes, offload.buffers)
            for layer in (layer for layer in wanted if layer not in self._away):
                self._take(layer)
            for layer in [layer for layer in self._away if layer not in wanted]:
                self._away.pop(layer).come_back(self._build.device)
        layers = sorted(layer for layer, away in self._away.items() if away.size)
        sizes = [self._away[layer].size for layer in layers]
        buffers = min(offload.buffers, len(layers))
        largest = max(sizes, default=0)
        saved = sum(sizes) - buffers * largest
        if saved <= 0:
            raise ConfigError(
                f"{len(layers)} of this rank's {len(self._blocks)} layers would lie in memory of "
                f"the host, {sum(sizes):,} bytes, and {buffers} buffers on the device be "
                f"{buffers * largest:,}: nothing is saved",
                hint="let more layers lie there (--cpu-offload-gb, --offload-num-in-group), or "
                "lower --offload-prefetch-step",
            )
        if saved < offload.asked_bytes:
            log.warning(
                "--cpu-offload-gb %.3f: all %d layers of this rank give up %.3f GiB, no more",
                *(offload.asked_bytes / _GIB, len(layers), saved / _GIB),
            )
        slots = [self._buffer(largest) for _ in range(buffers)]
        away = [self._away[layer] for layer in layers]
        for at, one in enumerate(away):
            one.lie_in(slots[at % buffers])
        _Turns(away, slots, self._platform.side_stream()).hang(
            model.layers[model.stage[0]], [model.layers[layer] for layer in layers]
        )
        log.info(
            "weights of %d of %d layers, %.3f GiB, lie in memory of the host and come through %d "
            "buffers of %.1f MiB: the device holds %.3f GiB less",
            *(len(layers), len(self._blocks), sum(sizes) / _GIB, buffers, largest / (1 << 20)),
            saved / _GIB,
        )

    def _goes_now(self, layer: int) -> bool:
        """Of what is to be given up in all, as many layers as come first: which ones it will be is
        known when all sizes are."""
        offload = self._offload
        if not offload.asked_bytes:
            return offload.is_of_group(layer)
        sizes = [away.size for away in self._away.values()]
        return sum(sizes) < offload.asked_bytes + offload.buffers * max(sizes, default=0)

    def _take(self, layer: int) -> None:
        tensors = list(_tensors_of(self._blocks[layer], self._build))
        self._away[layer] = _Away(_parts_of(tensors), self._platform)

    def _size_of(self, layer: int) -> int:
        if layer in self._away:
            return self._away[layer].size
        return _size(_parts_of(_tensors_of(self._blocks[layer], self._build)))

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._build.device)


def spread(sizes: Mapping[int, int], asked_bytes: int, buffers: int) -> list[int]:
    """The fewest layers, evenly spread, that give up as many bytes as are asked for; all where no
    choice does.

    Args:
        sizes: bytes by layer, in the order in which they run.
        buffers: that stay on the device, each as large as the largest of those layers.
    """
    layers = list(sizes)
    for count in range(1, len(layers)):
        chosen = [layers[(at + 1) * len(layers) // count - 1] for at in range(count)]
        kept = min(buffers, count) * max(sizes[layer] for layer in chosen)
        if sum(sizes[layer] for layer in chosen) - kept >= asked_bytes:
            return chosen
    return layers


@dataclass(frozen=True)
class _Part:
    """One piece of device memory, and the tensors that look at it."""

    bytes: Tensor
    """[size] uint8"""
    views: list[Tensor]

    @property
    def room(self) -> int:
        """Bytes that it takes in a buffer."""
        return -(-self.bytes.numel() // _ALIGNED) * _ALIGNED


class _Away:
    """The weights of one block in pinned memory of the host; until they lie in a buffer, the
    block's tensors are empty."""

    def __init__(self, parts: Sequence[_Part], platform: Platform) -> None:
        self.size = _size(parts)
        self.host = platform.pinned((self.size,), torch.uint8)
        self._views: list[tuple[Tensor, int, torch.Size, tuple[int, ...]]] = []
        """Each with its place in the block's bytes, in items of its type, shape and strides."""
        at = 0
        with torch.inference_mode():
            for part in parts:
                self.host[at : at + part.bytes.numel()].copy_(part.bytes)
                for view in part.views:
                    first = at // view.element_size() + int(view.storage_offset())
                    self._views.append((view, first, view.size(), view.stride()))
                    view.set_(view.new_empty(0).untyped_storage(), 0, (0,), (1,))
                at += part.room

    def lie_in(self, buffer: Tensor) -> None:
        with torch.inference_mode():
            for view, first, size, stride in self._views:
                view.set_(buffer.untyped_storage(), first, size, stride)

    def come_back(self, device: torch.device) -> None:
        """Stay on the device, in memory of its own."""
        self.lie_in(self.host.to(device))


class _Turns:
    """The blocks of a pass, one after another through the buffers.

    Block k lies in buffer k modulo their number. As soon as it has run, the block that takes the
    buffer after it is on its way, on a stream of its own.
    """

    def __init__(
        self, blocks: Sequence[_Away], slots: Sequence[Tensor], stream: SideStream
    ) -> None:
        self._blocks = blocks
        self._slots = slots
        self._stream = stream
        self._there: list[object] = [None] * len(blocks)
        """Marks behind the copies of this pass."""

    def hang(self, first: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """first: the block that a pass begins with, be it one of `blocks` or not."""
        first.register_forward_pre_hook(self._begin)
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter, number))
            block.register_forward_hook(partial(self._leave, number))

    def _begin(self, *_: object) -> None:
        mark = self._stream.record_event()  # what the pass before has read
        for number in range(len(self._slots)):
            self._send(number, mark)

    def _enter(self, number: int, *_: object) -> None:
        self._stream.wait(self._there[number])

    def _leave(self, number: int, *_: object) -> None:
        if number + len(self._slots) < len(self._blocks):
            self._send(number + len(self._slots), self._stream.record_event())

    def _send(self, number: int, after: object) -> None:
        host, slot = self._blocks[number].host, self._slots[number % len(self._slots)]
        work = partial(slot[: len(host)].copy_, host, non_blocking=True)
        self._there[number] = self._stream.run(work, after)


def _tensors_of(modules: Iterable[nn.Module], build: Build) -> Iterator[Tensor]:
    """The tensors with which layers multiply: those of more than one dimension. Vectors stay: they
    are small, and adapters read some of them outside of a pass."""
    groups = build.groups
    common = (build, *_values(build), *_values(groups))
    seen = {id(value) for value in common}
    for module in modules:
        for name, value in vars(module).items():
            if name != "_modules":
                yield from _within(value, build.device, seen, _DEEPEST)


def _within(value: object, device: torch.device, seen: set[int], depth: int) -> Iterator[Tensor]:
    """Those tensors of the device that are a value, or in it; each once."""
    if id(value) in seen or not depth:
        return
    if isinstance(value, Tensor):
        seen.add(id(value))
        if value.device == device and value.dim() > 1 and value.numel():
            yield value
        return
    inside: Iterable[object] = ()
    if isinstance(value, list | tuple):
        inside = cast(Sequence[object], value)
    elif isinstance(value, dict):
        inside = cast(Mapping[object, object], value).values()
    elif not isinstance(value, nn.Module | type | FunctionType | ModuleType | torch.dtype):
        inside = _values(value)
    if inside:
        seen.add(id(value))
    for one in inside:
        yield from _within(one, device, seen, depth - 1)


def _values(value: object) -> list[object]:
    """Of an object's attributes."""
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def _parts_of(tensors: Iterable[Tensor]) -> list[_Part]:
    """The memory that tensors look at, each piece once."""
    found: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return [_Part(_bytes_of(views[0]), views) for views in found.values()]


def _bytes_of(tensor: Tensor) -> Tensor:
    """All memory of a tensor; [size] uint8."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _size(parts: Sequence[_Part]) -> int:
    return sum(part.room for part in parts)
