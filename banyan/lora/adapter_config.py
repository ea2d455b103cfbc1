"""AdapterConfig: what a low-rank adapter says of itself, whatever form it is stored in. No tensors;
whether it fits a model is found out where that is loaded (`lora/load.py`).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.formats.mapped import TensorInfo

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 1 << 12
_MAX_EXPERTS = 1 << 16
EMBEDDING, HEAD, EXPANSION, DORA, EXPERTS, ROUTER = KINDS = (
    *("embed_tokens", "lm_head", "kv_b_proj", "DoRA"),
    *("experts", "router"),
)
_ROUTERS = ("gate", "router", "wg", "ffn_gate_inp")
"""Last parts of routers' names in checkpoints."""
CLASSES = "score"
"""Last part of the name of a head of classes; it takes the room of one of tokens."""
ENCODER_CLASSES = "classifier"
"""The same of encoders, whose heads may have two projections below it, each with a bias."""
_OTHER_ENDS = {"token_embd": EMBEDDING, "output": HEAD, CLASSES: HEAD}
TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class LowRank:
    """The matrices of one projection: outputs += scale · up · down · inputs.

    Attributes:
        experts: how many of them lie in these matrices, each with the rank, inputs and outputs that
            are told; 0 where it is one projection. In three dimensions the first is theirs, 1 where
            all have the same; in two, ranks of `down` are by expert, and those of `up` by rank and
            then by expert.
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
    experts: int = 0


@dataclass(frozen=True)
class ReplacedWeight:
    """A weight that takes the place of the base's.

    Attributes:
        is_copy: it is the base's own, saved beside matrices for it.
        bias: tensor that takes the place of the bias beside it; "" for none.
    """

    name: str
    shape: tuple[int, ...]
    is_copy: bool = False
    bias: str = ""


@dataclass(frozen=True)
class TokenRows:
    """Rows that take the place of the base's, of some tokens.

    Attributes:
        name: of the tensor, [tokens, width].
        ids: of the tokens, in its order.
    """

    name: str
    ids: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class AdapterConfig:
    """
    Attributes:
        format: "safetensors" (PEFT's folder) or "gguf" (llama.cpp's file).
        base: what the adapter says it was made for; a name that binds nobody.
        modules: name of the projection in the base's checkpoint -> its matrices.
        saved: module -> the weight that it brings whole.
        targets: last parts of these names that it claims, each in every layer; () where it claims
            something else.
        stacked: the same of parameters that hold all experts of a layer (`target_parameters`).
        tokens: module -> the rows that it brings of single tokens.
        highest_token: of those that a tokenizer beside it adds to its words; -1 for none.
    """

    path: str
    base: str
    modules: Mapping[str, LowRank]
    size_bytes: int
    format: str = "safetensors"
    targets: tuple[str, ...] = ()
    saved: Mapping[str, ReplacedWeight] = field(default_factory=dict[str, ReplacedWeight])
    stacked: tuple[str, ...] = ()
    tokens: Mapping[str, TokenRows] = field(default_factory=dict[str, TokenRows])
    highest_token: int = -1

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
        names = {name.rpartition(".")[2] for name in (*self.modules, *self.saved, *self.tokens)}
        has_gains = any(found.magnitude for found in self.modules.values())
        names = {_OTHER_ENDS.get(name, name) for name in names}
        found = names & {EMBEDDING, HEAD, EXPANSION}
        found |= {DORA} if has_gains else set()
        found |= {EXPERTS} if any(is_expert_module(name) for name in self.modules) else set()
        return frozenset(found | {ROUTER} if any(map(_is_router, self.modules)) else found)

    @property
    def adapted(self) -> tuple[str, ...]:
        """Last parts of the projections' names."""
        return tuple(sorted({name.rpartition(".")[2] for name in self.modules}))


def is_expert_module(name: str) -> bool:
    """Whether a module belongs to experts that tokens choose."""
    parts = name.split(".")
    return "experts" in parts or parts[-1].endswith("_exps")


def _is_router(name: str) -> bool:
    return name.rpartition(".")[2] in _ROUTERS or name.endswith(".router.layer")


def check_types(tensors: tuple[TensorInfo, ...], folder: str) -> None:
    """ConfigError for numbers in a type that is not read."""
    for tensor in tensors:
        if tensor.type not in TYPES:
            raise ConfigError(
                f"adapter {folder!r}: {printable(tensor.name, 120)} is {tensor.type}; "
                f"{', '.join(TYPES)} are read",
                hint="save it in one of them",
            )


def stacked(
    module: str, both: tuple[TensorInfo, TensorInfo], scale: tuple[int, float, float], folder: str
) -> LowRank:
    """The matrices of all experts of a layer.

    Args:
        both: down and up.
        scale: rank, alpha, and what they come to.

    Raises:
        ConfigError: they are no pair of such a rank.
    """
    (down, up), (rank, alpha, factor) = both, scale
    count = _expert_count(down.shape, up.shape, rank)
    if not 0 < count <= _MAX_EXPERTS or not all((*down.shape, *up.shape)):
        raise ConfigError(
            f"adapter {folder!r}: {printable(module, 100)} has matrices of {list(down.shape)} and "
            f"{list(up.shape)}, which are not those of experts, and its configuration says rank "
            f"{rank}",
            hint="the configuration and the weights do not belong together",
        )
    outputs = up.shape[-2] if len(up.shape) == 3 else up.shape[0]
    return LowRank(
        rank=rank,
        alpha=alpha,
        inputs=down.shape[-1],
        outputs=outputs,
        scale=factor,
        names=(down.name, up.name),
        type=down.type,
        experts=count,
    )


def _expert_count(down: tuple[int, ...], up: tuple[int, ...], rank: int) -> int:
    """How many experts; 0 where these are no matrices of several."""
    if len(down) == len(up) == 2:
        return down[0] // rank if down[0] == up[1] and down[0] % rank == 0 else 0
    if len(down) != 3 or len(up) != 3 or down[1] != rank or up[2] != rank:
        return 0
    counts = {down[0], up[0]}
    return max(counts) if len(counts - {1}) <= 1 else 0
