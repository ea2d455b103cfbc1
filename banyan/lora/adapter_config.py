"""AdapterConfig: a LoRA adapter's configuration and tensor shapes, read from PEFT or GGUF files.

No tensors are read here. `lora/fit.py` checks an adapter against a model.
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
    "embed_tokens",
    "lm_head",
    "kv_b_proj",
    "DoRA",
    "experts",
    "router",
)
_ROUTERS = ("gate", "router", "wg", "ffn_gate_inp")
"""Last parts of routers' names in checkpoints."""
CLASSES = "score"
"""Last part of the name of a classification head; it uses the capacity for `lm_head`."""
ENCODER_CLASSES = "classifier"
"""Classification head of an encoder: one or two projections, each with a bias."""
_OTHER_ENDS = {"token_embd": EMBEDDING, "output": HEAD, CLASSES: HEAD}
TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class LowRank:
    """The matrices of one projection: outputs += scale · up · down · inputs.

    Attributes:
        names: tensors of `down` and `up` in the file.
        experts: number of experts in these matrices; `rank`, `inputs` and `outputs` are per expert.
            0: a plain projection. Three dimensions: the first is the expert, of size 1 if all
            experts share the matrix. Two dimensions: `down` has its ranks ordered by expert, `up`
            by rank and then by expert.
        magnitude: tensor with the row norms of weight plus update (DoRA); "" if there is none.
    """

    rank: int
    alpha: float
    inputs: int
    outputs: int
    scale: float
    names: tuple[str, str]
    type: str = "F32"
    magnitude: str = ""
    experts: int = 0


@dataclass(frozen=True)
class ReplacedWeight:
    """A weight that replaces the base model's.

    Attributes:
        is_copy: it is the base model's own weight, saved together with LoRA matrices for it.
        bias: tensor that replaces the bias; "" if there is none.
    """

    name: str
    shape: tuple[int, ...]
    is_copy: bool = False
    bias: str = ""


@dataclass(frozen=True)
class TokenRows:
    """Rows of single tokens that replace those in the embedding or head.

    Attributes:
        name: tensor of the rows, [tokens, width].
        ids: token ids, in the order of the rows.
    """

    name: str
    ids: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class AdapterConfig:
    """A LoRA adapter without its numbers.

    Attributes:
        format: "safetensors" (PEFT's folder) or "gguf" (llama.cpp's file).
        base: name of the base model according to the adapter; only shown.
        modules: name of the projection in the base model's checkpoint -> its matrices.
        saved: module -> weight that the adapter replaces (`modules_to_save`).
        targets: last parts of the names in `target_modules`, each present in every layer; () if the
            configuration names modules in another way.
        stacked: the same for parameters that hold all experts of a layer (`target_parameters`).
        tokens: module -> replaced rows of single tokens.
        highest_token: highest id that the adapter's tokenizer adds to the vocabulary; -1 for none.
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
        """The file with the matrices."""
        return self.path if self.format == "gguf" else os.path.join(self.path, WEIGHTS)

    @property
    def files(self) -> tuple[str, ...]:
        """All files of the adapter."""
        if self.format == "gguf":
            return (self.path,)
        return (os.path.join(self.path, CONFIG), self.weights)

    @property
    def rank(self) -> int:
        """The highest rank of all projections."""
        return max((found.rank for found in self.modules.values()), default=0)

    @property
    def kinds(self) -> frozenset[str]:
        """Changes besides plain projections that the server must reserve memory for, from KINDS."""
        names = {name.rpartition(".")[2] for name in (*self.modules, *self.saved, *self.tokens)}
        has_gains = any(found.magnitude for found in self.modules.values())
        names = {_OTHER_ENDS.get(name, name) for name in names}
        found = names & {EMBEDDING, HEAD, EXPANSION}
        found |= {DORA} if has_gains else set()
        found |= {EXPERTS} if any(is_expert_module(name) for name in self.modules) else set()
        return frozenset(found | {ROUTER} if any(map(_is_router, self.modules)) else found)

    @property
    def adapted(self) -> tuple[str, ...]:
        """Last parts of the names of all adapted projections."""
        return tuple(sorted({name.rpartition(".")[2] for name in self.modules}))


def is_expert_module(name: str) -> bool:
    """Whether a module belongs to routed experts."""
    parts = name.split(".")
    return "experts" in parts or parts[-1].endswith("_exps")


def _is_router(name: str) -> bool:
    return name.rpartition(".")[2] in _ROUTERS or name.endswith(".router.layer")


def check_types(tensors: tuple[TensorInfo, ...], folder: str) -> None:
    """ConfigError if a tensor has a dtype that is not supported."""
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
    """Describe matrices that hold all experts of a layer.

    Args:
        both: down and up.
        scale: rank, alpha and the resulting scale.

    Raises:
        ConfigError: the shapes do not match this rank.
    """
    (down, up), (rank, alpha, factor) = both, scale
    count = _expert_count(down.shape, up.shape, rank)
    if not 0 < count <= _MAX_EXPERTS or not all((*down.shape, *up.shape)):
        raise ConfigError(
            f"adapter {folder!r}: {printable(module, 100)} has matrices of {list(down.shape)} and "
            f"{list(up.shape)}, which do not match experts; its configuration says rank "
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
    """Number of experts in two matrices; 0 if their shapes do not match."""
    if len(down) == len(up) == 2:
        return down[0] // rank if down[0] == up[1] and down[0] % rank == 0 else 0
    if len(down) != 3 or len(up) != 3 or down[1] != rank or up[2] != rank:
        return 0
    counts = {down[0], up[0]}
    return max(counts) if len(counts - {1}) <= 1 else 0
