"""Weight offloading: weights of some blocks stay in pinned host memory, and are copied to the
device just before they are used in each forward pass.

The tensors of such a block are views into one of a few device buffers, which the blocks use in
turns. The addresses never change, so captured steps replay correctly; they include the copies,
because each pass starts and awaits its own. A block's tensors are found by walking its attributes,
so packed weights of any kernel work.
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
"""Alignment in bytes; more than any kernel requires."""
_DEEPEST = 6
"""Most levels of nested objects that are searched for weights."""


@dataclass(frozen=True)
class Offload:
    """The offloading flags.

    Attributes:
        asked_bytes: device memory to save; 0 = `group` decides which layers are offloaded.
        group, of_group: of each `group` layers the last `of_group` are offloaded.
        ahead: layers that are prefetched while one runs.
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
        """Whether `group` selects this layer."""
        return self.group > 0 and layer % self.group >= self.group - self.of_group


def open_offload(device: DeviceConfig, platform: Platform) -> Offload | None:
    """None = nothing is offloaded."""
    if not device.offload_gib and device.offload_group < 1:
        return None
    if not platform.traits.async_launch:
        log.info(
            "%s have no effect on %s: its weights are in host memory already",
            _FLAGS,
            platform.traits.name,
        )
        return None
    asked = round(device.offload_gib * _GIB)
    group, of_group = device.offload_group, device.offload_of_group
    return Offload(platform, asked, group, of_group, device.offload_ahead)


def not_streamed(model_config: ModelConfig) -> ConfigError:
    """The error for models whose blocks cannot be offloaded."""
    return ConfigError(
        f"{_FLAGS}: layers of {model_config.architecture} cannot be offloaded, only of decoders",
        hint="leave them out, and --model-impl at auto",
    )


class OffloadedBlocks:
    """Offloads blocks of one model while it is loaded, so that the device never holds all weights.

    Call `begin`, `filled` for each block, then `settle`.

    Args:
        build: objects that all layers share; they belong to no block.
    """

    def __init__(self, offload: Offload, build: Build) -> None:
        self._offload = offload
        self._platform = offload.platform
        self._build = build
        self._blocks: dict[int, list[nn.Module]] = {}
        """By layer, the modules that belong to no other block."""
        self._away: dict[int, _HostBlock] = {}

    def begin(self, model: Model) -> None:
        """Take a model whose weights are not loaded yet.

        Raises:
            ConfigError: its blocks cannot be offloaded.
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
        """All weights of a block are loaded."""
        if layer not in self._blocks or not self._goes_now(layer):
            return
        self._take(layer)

    def settle(self, model: Model) -> None:
        """All weights are loaded. Choose the final layers and install the hooks.

        Raises:
            ConfigError: offloading would save no device memory.
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
                offload.asked_bytes / _GIB,
                len(layers),
                saved / _GIB,
            )
        slots = [self._buffer(largest) for _ in range(buffers)]
        away = [self._away[layer] for layer in layers]
        for at, one in enumerate(away):
            one.use(slots[at % buffers])
        _Prefetcher(away, slots, self._platform.side_stream()).hang(
            model.layers[model.stage[0]], [model.layers[layer] for layer in layers]
        )
        log.info(
            "weights of %d of %d layers, %.3f GiB, lie in memory of the host and come through %d "
            "buffers of %.1f MiB: the device holds %.3f GiB less",
            len(layers),
            len(self._blocks),
            sum(sizes) / _GIB,
            buffers,
            largest / (1 << 20),
            saved / _GIB,
        )

    def _goes_now(self, layer: int) -> bool:
        """Whether to offload this layer while loading. With `asked_bytes` the first layers go,
        until enough is saved; `settle` chooses again when all sizes are known."""
        offload = self._offload
        if not offload.asked_bytes:
            return offload.is_of_group(layer)
        sizes = [away.size for away in self._away.values()]
        return sum(sizes) < offload.asked_bytes + offload.buffers * max(sizes, default=0)

    def _take(self, layer: int) -> None:
        tensors = list(_tensors_of(self._blocks[layer], self._build))
        self._away[layer] = _HostBlock(_parts_of(tensors), self._platform)

    def _size_of(self, layer: int) -> int:
        if layer in self._away:
            return self._away[layer].size
        return _size(_parts_of(_tensors_of(self._blocks[layer], self._build)))

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._build.device)


def spread(sizes: Mapping[int, int], asked_bytes: int, buffers: int) -> list[int]:
    """The fewest layers, evenly spread, that save `asked_bytes`; all layers if none do.

    Args:
        sizes: bytes by layer, in the order in which they run.
        buffers: buffers on the device, each as large as the largest chosen layer.
    """
    layers = list(sizes)
    for count in range(1, len(layers)):
        chosen = [layers[(at + 1) * len(layers) // count - 1] for at in range(count)]
        kept = min(buffers, count) * max(sizes[layer] for layer in chosen)
        if sum(sizes[layer] for layer in chosen) - kept >= asked_bytes:
            return chosen
    return layers


@dataclass(frozen=True)
class _Storage:
    """One piece of device memory, and the tensors that are views of it."""

    bytes: Tensor
    """[size] uint8"""
    views: list[Tensor]

    @property
    def padded_bytes(self) -> int:
        """Bytes that it takes in a buffer."""
        return -(-self.bytes.numel() // _ALIGNED) * _ALIGNED


class _HostBlock:
    """The weights of one block in pinned host memory. The block's tensors are empty until `use`."""

    def __init__(self, parts: Sequence[_Storage], platform: Platform) -> None:
        self.size = _size(parts)
        self.host = platform.pinned((self.size,), torch.uint8)
        self._views: list[tuple[Tensor, int, torch.Size, tuple[int, ...]]] = []
        """(tensor, offset in the block in items of its dtype, shape, strides)"""
        at = 0
        with torch.inference_mode():
            for part in parts:
                self.host[at : at + part.bytes.numel()].copy_(part.bytes)
                for view in part.views:
                    first = at // view.element_size() + int(view.storage_offset())
                    self._views.append((view, first, view.size(), view.stride()))
                    view.set_(view.new_empty(0).untyped_storage(), 0, (0,), (1,))
                at += part.padded_bytes

    def use(self, buffer: Tensor) -> None:
        """Make the block's tensors views of `buffer`."""
        with torch.inference_mode():
            for view, first, size, stride in self._views:
                view.set_(buffer.untyped_storage(), first, size, stride)

    def come_back(self, device: torch.device) -> None:
        """Move the weights back to the device for good."""
        self.use(self.host.to(device))


class _Prefetcher:
    """Copies the blocks of a pass into the buffers, one after another.

    Block k uses buffer k modulo their number. As soon as it has run, the copy of the next block for
    that buffer starts on a side stream.
    """

    def __init__(
        self, blocks: Sequence[_HostBlock], slots: Sequence[Tensor], stream: SideStream
    ) -> None:
        self._blocks = blocks
        self._slots = slots
        self._stream = stream
        self._there: list[object] = [None] * len(blocks)
        """Stream events after the copies of this pass."""

    def hang(self, first: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Install the hooks. first: the block with which a pass begins, offloaded or not."""
        first.register_forward_pre_hook(self._begin)
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter, number))
            block.register_forward_hook(partial(self._leave, number))

    def _begin(self, *_: object) -> None:
        event = self._stream.record_event()  # the last pass must have read the buffers
        for number in range(len(self._slots)):
            self._send(number, event)

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
    """The weight matrices: tensors of more than one dimension. Vectors stay on the device: they are
    small, and adapters read some of them outside of a pass."""
    groups = build.groups
    common = (build, *_values(build), *_values(groups))
    seen = {id(value) for value in common}
    for module in modules:
        for name, value in vars(module).items():
            if name != "_modules":
                yield from _within(value, build.device, seen, _DEEPEST)


def _within(value: object, device: torch.device, seen: set[int], depth: int) -> Iterator[Tensor]:
    """The device tensors in a value, each once."""
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
    """The values of an object's attributes."""
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def _parts_of(tensors: Iterable[Tensor]) -> list[_Storage]:
    """The memory of some tensors, each piece once."""
    found: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return [_Storage(_bytes_of(views[0]), views) for views in found.values()]


def _bytes_of(tensor: Tensor) -> Tensor:
    """All memory of a tensor, [size] uint8."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _size(parts: Sequence[_Storage]) -> int:
    return sum(part.padded_bytes for part in parts)
