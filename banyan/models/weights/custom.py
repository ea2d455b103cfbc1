"""Functions of the user's own that change what a checkpoint holds before the model takes it.

Each takes the checkpoint's tensors, (name, StoredWeight) one after another, and yields what the
model shall see instead; the loader's account then holds for that.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

from banyan.base.named_code import load_named
from banyan.models.weights.quant.base import Stored

Tensors = Iterator[tuple[str, Stored]]
Transform = Callable[[Tensors], Tensors]


def load_transforms(names: Sequence[str], checkpoint: str) -> list[Transform]:
    """Import the functions, in order.

    Raises:
        ConfigError: one is missing, cannot be called, or lies in the folder of the checkpoint.
    """
    return [cast(Transform, load_named("--custom-weight-loader", n, checkpoint)) for n in names]
