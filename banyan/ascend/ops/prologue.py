"""All that comes before latent attention as one operator (`npu_mla_prolog_v3`), which writes pages
too: of plain weights, of W8A8_DYNAMIC ones, or of plain ones but for those that make heads.

Its weights lie as checkpoints have them, head by head with rotating rows in pairs, and rotated
halves come out of it. What it has not the shape or the numbers for goes through several operators,
and the log says why.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from banyan.ascend.ops.contracts import FRACTAL_PAGE, LATENT_DIM, LATENT_ROPE_DIM, either
from banyan.ascend.ops.latent_contracts import (
    DIMS,
    FRACTAL_PAGES,
    HEADS,
    PLAIN,
    PLAIN_DIM,
    PLAIN_PAGES,
    QUERIES,
    QUERY_RANK,
    WHOLLY,
    PrologWeights,
)
from banyan.ascend.ops.operators import Operators
from banyan.ops.activation_quant import DYNAMIC, Rounding
from banyan.ops.api import KEYS, LATENT, PARTS, QUERY, SQUEEZE, PrologueShape
from banyan.ops.stored import STORAGE_TYPES, StoredWeight

_MODES = {
    (False, False, False): PLAIN,
    (False, True, False): QUERIES,
    (True, True, True): WHOLLY,
}
"""Whether SQUEEZE, QUERY and LATENT are of 8 bits."""
_IN_ORDER = (SQUEEZE, QUERY, KEYS, LATENT)
"""As `PrologWeights` has them."""


class Prologue:
    """Of one layer.

    Args:
        say: logs why there is none.
        is_fractal: pages of as many tokens as that form takes have it.
    """

    def __init__(
        self,
        operators: Operators,
        shape: PrologueShape,
        device: torch.device,
        say: Callable[[str], None],
        is_fractal: bool = False,
    ) -> None:
        self._operators, self._shape, self._device, self._say = operators, shape, device, say
        self._is_fractal = is_fractal
        self._parts: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._types: dict[str, str] = {}

    def take(self, part: str, weight: StoredWeight) -> None:
        self.__dict__.pop("_weights", None)
        self._types[part] = weight.type
        if part == KEYS:
            self._parts[part] = (weight.dense.to(self._device, torch.bfloat16), None)
        elif weight.type == DYNAMIC:
            found = Rounding.of(weight.raw, weight.type)
            order = self._order(part, len(found.numbers))
            columns = found.numbers[order].t().contiguous().to(self._device)
            scale = found.scale[order].unsqueeze(0).to(self._device)
            self._parts[part] = (self._operators.cast_fractal(columns), scale)
        elif STORAGE_TYPES[weight.type].is_float:
            rows = weight.dense[self._order(part, weight.shape[0])]
            columns = rows.t().contiguous().to(self._device, torch.bfloat16)
            self._parts[part] = (self._operators.cast_fractal(columns), None)
        else:
            self._parts.pop(part, None)

    def is_ready(self) -> bool:
        if len(self._types) < len(PARTS):
            return False
        if why := self._obstacle():
            self._say(why)
        return not why

    def __call__(
        self,
        x: Tensor,
        gammas: tuple[Tensor, Tensor],
        angles: tuple[Tensor, Tensor] | None,
        pages: tuple[Tensor, Tensor],
        flat_locations: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights, units = self._weights, None
        if weights.mode == WHOLLY:
            x, units = self._operators.dynamic_quant(x.contiguous())
            units = units.unsqueeze(1)
        turns = self._turns(len(x), angles)
        is_fractal = self._is_fractal and pages[0].shape[1] == FRACTAL_PAGE
        latents, keys = (part.unsqueeze(2) for part in pages)
        eps = (self._shape.query_eps, self._shape.latent_eps)
        q, turned, normed, factors = self._operators.latents.mla_prolog(
            x.contiguous(),
            units,
            weights,
            gammas,
            turns,
            (latents, keys),
            flat_locations,
            eps,
            has_norm=self._shape.reads_squeezed,
            mode=FRACTAL_PAGES if is_fractal else PLAIN_PAGES,
        )
        if weights.mode != PLAIN and self._shape.reads_squeezed:
            normed = (normed.float() * factors).to(q.dtype)
        return q, turned, normed

    def _turns(self, tokens: int, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """sin and cos of every number of a turned part. [tokens, 64] bf16"""
        if angles is None:
            still = torch.zeros(tokens, LATENT_ROPE_DIM, dtype=torch.bfloat16, device=self._device)
            return still, still + 1
        cos, sin = (torch.cat([part, part], -1).to(torch.bfloat16) for part in angles)
        return sin, cos

    @cached_property
    def _weights(self) -> PrologWeights:
        parts = self._parts
        mode = _MODES[self._rounded]
        scales = tuple(parts[part][1] for part in (SQUEEZE, QUERY, LATENT))
        return PrologWeights(
            mode,
            *[parts[part][0] for part in _IN_ORDER],
            scales=(scales[0], scales[1], scales[2]),
        )

    @property
    def _rounded(self) -> tuple[bool, bool, bool]:
        squeeze, query, latent = (self._types[part] == DYNAMIC for part in (SQUEEZE, QUERY, LATENT))
        return squeeze, query, latent

    def _obstacle(self) -> str:
        if set(self._parts) == set(PARTS) and self._rounded in _MODES:
            return ""
        types = ", ".join(f"{part} {self._types[part]}" for part in (SQUEEZE, QUERY, LATENT))
        return f"its weights are {types}, not all floats, all {DYNAMIC} or {QUERY} alone {DYNAMIC}"

    def _order(self, part: str, rows: int) -> Tensor:
        """The row of each of the operator's rows, which has rotated rows in pairs."""
        order = torch.arange(rows)
        if part == SQUEEZE:
            return order
        width = (PLAIN_DIM if part == QUERY else LATENT_DIM) + LATENT_ROPE_DIM
        first = width - LATENT_ROPE_DIM
        pairs = torch.arange(LATENT_ROPE_DIM).view(2, -1).t().flatten()
        within = torch.cat([torch.arange(first), first + pairs])
        return (order.view(-1, width)[:, within]).flatten()


def open_prologue(
    operators: Operators,
    shape: PrologueShape,
    dtype: torch.dtype,
    device: torch.device,
    say: Callable[[str], None],
    is_fractal: bool = False,
) -> Prologue | None:
    why = shape.obstacle or _misfit(shape, dtype)
    if not why and operators.keeps_plain:
        why = "weights stay in their plain form, some of them in the memory of the host"
    if why:
        say(why)
        return None
    return Prologue(operators, shape, device, say, is_fractal)


def _misfit(shape: PrologueShape, dtype: torch.dtype) -> str:
    if dtype != torch.bfloat16:
        return f"activations are {dtype}, not torch.bfloat16"
    if shape.dim not in DIMS or shape.heads not in HEADS:
        return (
            f"the stream is {shape.dim} wide and a rank has {shape.heads} heads, not "
            f"{either(DIMS)} and a power of 2 up to {HEADS[-1]}"
        )
    widths = (shape.query_rank, shape.plain_dim, shape.rank, shape.rope_dim)
    wanted = (QUERY_RANK, PLAIN_DIM, LATENT_DIM, LATENT_ROPE_DIM)
    if widths != wanted:
        return f"queries are squeezed to, and heads and latents have {widths} numbers, not {wanted}"
    return ""
