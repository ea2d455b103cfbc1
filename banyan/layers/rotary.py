"""Rotary position embedding: the angle of every pair of dimensions at every position.

RoPE (Su et al. 2021), position interpolation (Chen et al. 2023), dynamic NTK, the Llama 3 rule,
YaRN (Peng et al. 2023) and LongRoPE (Ding et al. 2024). All equal transformers for the same
numbers.

LongRoPE has two sets of frequencies. The server uses the long set for every request if requests may
be longer than the original length, because keys of one set must not meet queries of the other.

Dynamic NTK depends on a length. A token at position p uses length p + 1, as transformers does when
a sequence is fed token by token. Cached keys are then independent of chunking and of prefix
sharing; the length of the whole prompt would make them depend on later tokens.

Multimodal RoPE (Qwen2-VL, arXiv 2409.12191) gives each token a position in time, row and column.
Text has the same position on all axes; a span with a grid has the positions of its cells, and what
follows goes on after the longer side of the grid. Here a position with axes is the ordinary one
plus a *shift* per axis. Shifts depend on the spans and the place alone, so they are the same in any
chunk. After the last span they are constant: a decode step adds what the prompt's last token had.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.model_config.model_config import RopeFacts
from banyan.ops.api import Ops

Angles = tuple[Tensor, Tensor]
"""cos and sin, [tokens, pairs] fp32."""


AXES = 3
"""Time, row, column."""


class Placed(Protocol):
    """What positions depend on; see messages/spans.py."""

    @property
    def first(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...


def axis_shifts(spans: Iterable[Placed], length: int) -> tuple[np.ndarray, int]:
    """What each axis adds to the positions of a prompt.

    Args:
        spans: in order; a shape of (1, 1, 0) is a line, with the positions of text.
        length: of the prompt.

    Returns:
        int32 [length, AXES], and the shift of every later place: it goes on after the largest
        position so far.
    """
    shifts, shift, end = np.zeros((length, AXES), np.int32), 0, 0
    for span in spans:
        shifts[end : span.first] = shift
        end = span.first + span.count
        times, rows, columns = span.shape
        if not columns:
            shifts[span.first : end] = shift
            continue
        grid = np.indices((times, rows, columns), np.int32).reshape(AXES, -1).T
        begin = span.first + shift
        shifts[span.first : end] = begin + grid - np.arange(span.first, end)[:, None]
        shift = begin + max(rows, columns) - end
    shifts[end:] = shift
    largest = int((shifts + np.arange(length)[:, None]).max(initial=-1))
    return shifts, largest + 1 - length


class Rotary:
    """Angles of one model, or of its layers of one kind.

    Args:
        dim: leading dimensions of a head that rotate.
        context_length: the checkpoint's trained length; dynamic NTK starts after it.
        served_length: longest request; selects LongRoPE's set.

        axes: axis of each pair, for positions with axes; () = none.

    Raises:
        ModelError: an unknown kind, or another number of axes than of pairs.
    """

    def __init__(
        self,
        dim: int,
        numbers: RopeFacts,
        context_length: int,
        served_length: int,
        ops: Ops,
        device: torch.device,
        axes: tuple[int, ...] = (),
    ) -> None:
        kinds = {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
        kinds |= {"dynamic": _plain, "longrope": partial(_longrope, length=served_length)}
        if numbers.kind not in kinds:
            raise ModelError(f"RoPE of kind {numbers.kind!r} is not one of: {', '.join(kinds)}")
        self.ops = ops
        self.dim = dim
        self.numbers = numbers
        self.context_length = context_length
        self.frequencies = kinds[numbers.kind](dim, numbers).to(device)  # [dim/2] fp32
        if numbers.is_backward:
            self.frequencies = -self.frequencies
        self.magnitude = _magnitude(numbers, context_length, served_length)
        if axes and (len(axes) != dim // 2 or numbers.kind == "dynamic"):
            raise ModelError(
                f"{len(axes)} rotary pairs have an axis, of {dim // 2} pairs of a RoPE of kind "
                f"{numbers.kind!r}"
            )
        self.axes = torch.tensor(axes, dtype=torch.int32, device=device) if axes else None

    def divide(self, divisors: Tensor) -> None:
        """Divide each frequency by a factor from the checkpoint. divisors: [dim/2]"""
        if divisors.shape != self.frequencies.shape:
            raise ModelError(
                f"the checkpoint has {divisors.numel()} RoPE factors, {self.dim} rotating "
                f"dimensions need {self.frequencies.numel()}"
            )
        self.frequencies = self.frequencies / divisors.to(self.frequencies)

    def __call__(self, positions: Tensor, shifts: Tensor | None = None) -> Angles:
        """positions: [tokens] int64; shifts: [tokens, axes] int32; returns cos, sin [tokens,
        dim/2] fp32."""
        if self.numbers.kind != "dynamic":
            if shifts is None or self.axes is None:
                return self.ops.rotary_angles(positions, self.frequencies, self.magnitude)
            return self.ops.rotary_angles(
                positions, self.frequencies, self.magnitude, shifts, self.axes
            )
        angles = positions.unsqueeze(1).float() * self._stretched(positions)
        return angles.cos(), angles.sin()

    def _stretched(self, positions: Tensor) -> Tensor:
        """Frequencies of each position by the NTK rule. [tokens, dim/2]"""
        lengths = (positions + 1).clamp(min=self.context_length).double()
        factor, dim = self.numbers.factor, self.dim
        growth = factor * lengths / self.context_length - (factor - 1)
        theta = self.numbers.theta * growth ** (dim / (dim - 2))
        return (theta.unsqueeze(1) ** -_exponents(dim).double().to(positions.device)).float()


def _exponents(dim: int) -> Tensor:
    """2i / dim for every pair i. [dim/2] fp32"""
    return torch.arange(0, dim, 2, dtype=torch.float) / dim


def _plain(dim: int, numbers: RopeFacts) -> Tensor:
    return 1.0 / numbers.theta ** _exponents(dim)


def _linear(dim: int, numbers: RopeFacts) -> Tensor:
    return _plain(dim, numbers) / numbers.factor


def _llama3(dim: int, numbers: RopeFacts) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, the ones between are mixed."""
    plain = _plain(dim, numbers)
    turns = numbers.original_length * plain / (2 * math.pi)  # within the trained length
    low, high = numbers.low_freq_factor, numbers.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / numbers.factor + kept * plain


def _yarn(dim: int, numbers: RopeFacts) -> Tensor:
    """Dimensions that turn often keep their frequency, slow ones are divided, a ramp between."""

    def dimension_of(turns: float) -> float:
        length = numbers.original_length / (turns * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(numbers.theta))

    low, high = dimension_of(numbers.beta_fast), dimension_of(numbers.beta_slow)
    if numbers.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    divided = ((torch.arange(dim // 2, dtype=torch.float) - low) / width).clamp(0, 1)
    plain = _plain(dim, numbers)
    return plain / numbers.factor * divided + plain * (1 - divided)


def _longrope(dim: int, numbers: RopeFacts, length: int) -> Tensor:
    """Each frequency has its own divisor, in one set per range of lengths."""
    is_long = length > numbers.original_length
    divisors = numbers.long_factor if is_long else numbers.short_factor
    if len(divisors) != dim // 2:
        raise ModelError(f"LongRoPE has {len(divisors)} factors, {dim // 2} frequencies need one")
    return 1.0 / (torch.tensor(divisors) * numbers.theta ** _exponents(dim))


def _magnitude(numbers: RopeFacts, context_length: int, served_length: int) -> float:
    """Factor on cos and sin that keeps the softmax as sharp as in training."""
    if numbers.kind == "yarn":
        return _yarn_magnitude(numbers)
    if numbers.kind == "longrope" and numbers.short_mscale and numbers.long_mscale:
        is_long = served_length > numbers.original_length
        return numbers.long_mscale if is_long else numbers.short_mscale
    if numbers.kind == "longrope":
        return _longrope_magnitude(numbers, context_length)
    return 1.0


def _longrope_magnitude(numbers: RopeFacts, context_length: int) -> float:
    """LongRoPE, section 3.3: from the ratio by which the trained length is extended."""
    if numbers.attention_factor is not None:
        return numbers.attention_factor
    stretch = numbers.factor if numbers.factor > 1 else context_length / numbers.original_length
    return math.sqrt(1 + math.log(max(1.0, stretch)) / math.log(numbers.original_length))


def _yarn_magnitude(numbers: RopeFacts) -> float:
    """YaRN, section 3.4."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(numbers.factor) + 1.0 if numbers.factor > 1 else 1.0

    if numbers.attention_factor is not None:
        return numbers.attention_factor
    if numbers.mscale and numbers.mscale_all_dim:
        return magnitude(numbers.mscale) / magnitude(numbers.mscale_all_dim)
    return magnitude(1.0)
