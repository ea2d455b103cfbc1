"""Matrices of an adapter that hold all experts of a layer: PEFT's form of stacked parameters
(`target_parameters`), and three dimensions with the experts first. Reads shapes, no tensors.
"""

import re
from collections.abc import Mapping

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.formats.mapped import TensorInfo
from banyan.formats.safetensors import SafetensorsFile
from banyan.lora.adapter_config import LowRank

_WRAPPED = re.compile(r"(.+\.experts)((?:\.base_layer)*)")
_STACK = re.compile(r".+\.experts\.(?:gate_up_proj|up_proj|gate_proj|down_proj)")
_FIRST = ("gate_up_proj", "up_proj")
_MAX_EXPERTS = 1 << 16


def is_stack(module: str) -> bool:
    """Whether a module is a parameter of all experts of a layer."""
    return bool(_STACK.fullmatch(module))


def named_stacks(
    file: SafetensorsFile,
    found: Mapping[str, dict[str, str]],
    parameters: tuple[str, ...],
    folder: str,
) -> dict[str, dict[str, str]]:
    """Modules by name, with the names of parameters instead of those of what PEFT wraps them in:
    one around the other, the first parameter innermost, ".experts.base_layer" and ".experts".

    Args:
        parameters: names that the configuration has, or ends of them.

    Raises:
        ConfigError: they cannot be told from one another.
    """
    plain = {name: both for name, both in found.items() if not _WRAPPED.fullmatch(name)}
    wrapped: dict[str, list[str]] = {}
    for name in sorted(found, key=len, reverse=True):
        if match := _WRAPPED.fullmatch(name):
            wrapped.setdefault(match[1], []).append(name)
    for block, layers in wrapped.items():
        named = [
            name
            for name in (*_FIRST, "down_proj")
            if any(f".{block}.{name}".endswith(f".{parameter}") for parameter in parameters)
        ]
        if len(layers) != len(named):
            raise ConfigError(
                f"adapter {folder!r}: {printable(block, 100)} has matrices for {len(layers)} "
                f"stacked parameters, and target_parameters names {len(named)} "
                f"({', '.join(named) or 'none'})",
                hint="the configuration and the weights do not belong together",
            )
        names = named if not _are_turned(file, found, layers) else named[::-1]
        for parameter, layer in zip(names, layers, strict=True):
            plain[f"{block}.{parameter}"] = found[layer]
    return plain


def _are_turned(
    file: SafetensorsFile, found: Mapping[str, dict[str, str]], layers: list[str]
) -> bool:
    """Whether the innermost of two parameters is the one behind the activation, which has half of
    the other's outputs as its inputs."""
    shapes = [
        (file.tensors[both["A"]].shape, file.tensors[both["B"]].shape)
        for both in (found[layer] for layer in layers)
        if len(both) == 2
    ]
    if len(shapes) != 2 or any(len(shape) != 2 for both in shapes for shape in both):
        return False
    (inner_in, inner_out), (outer_in, outer_out) = ((a[1], b[0]) for a, b in shapes)
    return (inner_out, outer_out) == (outer_in, 2 * inner_in)


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
    count = _count(down.shape, up.shape, rank)
    if not 0 < count <= _MAX_EXPERTS or not all((*down.shape, *up.shape)):
        raise ConfigError(
            f"adapter {folder!r}: {printable(module, 100)} has matrices of {list(down.shape)} and "
            f"{list(up.shape)}, which are not those of experts, and its configuration says rank "
            f"{rank}",
            hint="the configuration and the weights do not belong together",
        )
    outputs = up.shape[-2] if len(up.shape) == 3 else up.shape[0]
    names = (down.name, up.name)
    return LowRank(
        *(rank, alpha, down.shape[-1], outputs, factor, names),
        type=down.type,
        experts=count,
    )


def _count(down: tuple[int, ...], up: tuple[int, ...], rank: int) -> int:
    """How many experts; 0 where these are no matrices of several."""
    if len(down) == len(up) == 2:
        return down[0] // rank if down[0] == up[1] and down[0] % rank == 0 else 0
    if len(down) != 3 or len(up) != 3 or down[1] != rank or up[2] != rank:
        return 0
    counts = {down[0], up[0]}
    return max(counts) if len(counts - {1}) <= 1 else 0
