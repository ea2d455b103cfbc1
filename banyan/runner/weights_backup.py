"""WeightsBackup: keeps the weights of a device in host memory while their memory is released
(--enable-weights-cpu-backup). Weights of a CPU lie there already and stay.
"""

import gc
from collections.abc import Iterator
from types import FunctionType, ModuleType

import torch
from torch import Tensor

from banyan.models.base import Model

_OWNERS = ("banyan.layers", "banyan.models", "banyan.moe.layer", "banyan.ops", "banyan.ascend.ops")
"""Modules of classes whose objects hold weights."""
_CONTAINERS = (dict, list, tuple, set)


class WeightsBackup:
    """Copies the weights to the host and frees their memory on the device; tensors stay as they
    are, without content, until `restore`."""

    def __init__(self, model: Model) -> None:
        by_address = {t.untyped_storage().data_ptr(): t for t in _device_tensors(model) if t.nbytes}
        self._kept = [(tensor, _bytes_of(tensor).cpu()) for tensor in by_address.values()]
        for tensor, _ in self._kept:
            tensor.untyped_storage().resize_(0)

    @property
    def size_bytes(self) -> int:
        return sum(content.nbytes for _, content in self._kept)

    def restore(self) -> None:
        """Allocate the memory again, at other addresses, and copy the weights back."""
        for tensor, content in self._kept:
            tensor.untyped_storage().resize_(content.nbytes)
            _bytes_of(tensor).copy_(content)


def _bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of the tensor's storage."""
    storage = tensor.untyped_storage()
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(storage, 0, (storage.nbytes(),), (1,))


def _device_tensors(model: Model) -> Iterator[Tensor]:
    """The tensors on a device that a model's layers hold, also in packed products and closures."""
    stack: list[object] = [model]
    seen: dict[int, object] = {}
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            if not each.is_cpu:
                yield each
        elif isinstance(each, FunctionType):
            stack += [cell.cell_contents for cell in each.__closure__ or ()]
        elif isinstance(each, _CONTAINERS) or _is_owner(each):
            stack += gc.get_referents(each)


def _is_owner(each: object) -> bool:
    if isinstance(each, (type, ModuleType)):
        return False
    module = type(each).__module__
    return module.startswith(_OWNERS) or module in ("functools", "builtins") and callable(each)
