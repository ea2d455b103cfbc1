"""AdapterCard: what a low-rank adapter says of itself, whatever form it is stored in. No tensors;
whether it fits a model is found out where that is loaded (`models/weights/adapters.py`).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.formats.mapped import TensorInfo

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 1 << 12
EMBEDDING, HEAD, EXPANSION, DORA = KINDS = ("embed_tokens", "lm_head", "kv_b_proj", "DoRA")
_GGUF_ENDS = {"token_embd": EMBEDDING, "output": HEAD}
TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class LowRank:
    """The matrices of one projection: outputs += scale · up · down · inputs.

    Attributes:
        magnitude: tensor with the lengths of the rows of what weight and matrices come to (DoRA);
            "" for none.
    """

    rank: int
    alpha: float
    inputs: int
    outputs: int
    scale: float
    names: tuple[str, str]
    """Of down and up in the file."""
    type: str = "F32"
    magnitude: str = ""


@dataclass(frozen=True)
class Whole:
    """A weight that takes the place of the base's.

    Attributes:
        is_copy: it is the base's own, saved beside matrices for it.
    """

    name: str
    shape: tuple[int, ...]
    is_copy: bool = False


@dataclass(frozen=True)
class AdapterCard:
    """
    Attributes:
        format: "safetensors" (PEFT's folder) or "gguf" (llama.cpp's file).
        base: what the adapter says it was made for; a name that binds nobody.
        modules: name of the projection in the base's checkpoint -> its matrices.
        saved: module -> the weight that it brings whole.
        targets: last parts of these names that it claims, each in every layer; () where it claims
            something else.
    """

    path: str
    base: str
    modules: Mapping[str, LowRank]
    size_bytes: int
    format: str = "safetensors"
    targets: tuple[str, ...] = ()
    saved: Mapping[str, Whole] = field(default_factory=dict[str, Whole])

    @property
    def weights(self) -> str:
        """The file that holds the matrices."""
        return self.path if self.format == "gguf" else os.path.join(self.path, WEIGHTS)

    @property
    def files(self) -> tuple[str, ...]:
        """All that it is made of."""
        if self.format == "gguf":
            return (self.path,)
        return (os.path.join(self.path, CONFIG), self.weights)

    @property
    def rank(self) -> int:
        """The highest of any projection."""
        return max((found.rank for found in self.modules.values()), default=0)

    @property
    def kinds(self) -> frozenset[str]:
        """What room it needs beside that for projections: of KINDS."""
        names = {name.rpartition(".")[2] for name in (*self.modules, *self.saved)}
        has_gains = any(found.magnitude for found in self.modules.values())
        names = {_GGUF_ENDS.get(name, name) for name in names}
        found = names & {EMBEDDING, HEAD, EXPANSION}
        return frozenset(found | {DORA} if has_gains else found)

    @property
    def adapted(self) -> tuple[str, ...]:
        """Last parts of the projections' names."""
        return tuple(sorted({name.rpartition(".")[2] for name in self.modules}))


def check_types(tensors: tuple[TensorInfo, ...], folder: str) -> None:
    """ConfigError for numbers in a type that is not read."""
    for tensor in tensors:
        if tensor.type not in TYPES:
            raise ConfigError(
                f"adapter {folder!r}: {printable(tensor.name, 120)} is {tensor.type}; "
                f"{', '.join(TYPES)} are read",
                hint="save it in one of them",
            )
