"""A format of quantised checkpoints: which tensors together are one weight, and what it is.

A format translates into storage types (`ops/stored.py`), on the way from the file to the layers;
cuts over ranks, stacking and packing then follow from the type, and no layer knows the format.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.config.facts import Facts
from banyan.ops.stored import RawTensor, StoredWeight

Stored = StoredWeight | RawTensor
Parts = Mapping[str, Stored]
"""The tensors of one weight by the last part of their names: "weight", "weight_scale_inv" …"""
_SHOWN = 5


class QuantMethod(Protocol):
    """How one checkpoint was quantised; opened with its configuration."""

    def claims(self, last: str, tensor: Stored) -> bool:
        """Whether a tensor with this last part of a name belongs to a quantised weight."""
        ...

    def is_whole(self, parts: Parts) -> bool:
        """Whether all tensors of a weight are here."""
        ...

    def restore(self, parts: Parts) -> StoredWeight:
        """The weight [out, in] that the parts mean, in a storage type.

        Raises:
            ModelError: they do not fit together.
        """
        ...


OpenMethod = Callable[[Facts], QuantMethod]
"""From the `quantization_config` to the method; ModelError names a setting that is not served."""


def restored(
    tensors: Iterator[tuple[str, Stored]], method: QuantMethod
) -> Iterator[tuple[str, Stored]]:
    """The checkpoint with each quantised weight as one tensor "….weight", as soon as it is whole.

    Raises:
        ModelError: parts of a weight are missing or do not fit together.
    """
    waiting: dict[str, dict[str, Stored]] = {}
    for name, tensor in tensors:
        stem, _, last = name.rpartition(".")
        if not method.claims(last, tensor):
            yield name, tensor
            continue
        parts = waiting.setdefault(stem, {})
        parts[last] = tensor
        if not method.is_whole(parts):
            continue
        del waiting[stem]
        try:
            weight = method.restore(parts)
        except ModelError as error:
            raise ModelError(f"{printable(stem)!r}: {error.text}", error.hint) from None
        yield f"{stem}.weight", weight
    if waiting:
        first = ", ".join(printable(stem) for stem in list(waiting)[:_SHOWN])
        have = ", ".join(next(iter(waiting.values())))
        raise ModelError(
            f"{len(waiting)} quantised weights lack some of their tensors: {first} (has {have})",
            hint="a file of the checkpoint is missing, or quantization_config does not describe it",
        )
