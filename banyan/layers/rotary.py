"""Rotary position embedding: the angle of every pair of dimensions at every position.

RoPE (Su et al. 2021), position interpolation (Chen et al. 2023), dynamic NTK, the Llama 3 rule and
YaRN (Peng et al. 2023). All equal transformers for the same numbers. Dynamic NTK is the one whose
angles depend on a length: here a token at position p takes the length p + 1, which is what
transformers does when a sequence is fed token by token. A prompt's cached keys are then the same
however it was cut into chunks and whoever shares its prefix; a length taken from the whole prompt
would make them depend on tokens that come later.
"""

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from banyan.base.errors import ModelError
from banyan.ops.api import Ops


class RopeNumbers(Protocol):
    """The facts a checkpoint gives; names and meaning of the Hugging Face `rope_scaling`."""

    @property
    def theta(self) -> float: ...
    @property
    def kind(self) -> str: ...
    @property
    def factor(self) -> float: ...
    @property
    def original_length(self) -> int: ...
    @property
    def low_freq_factor(self) -> float: ...
    @property
    def high_freq_factor(self) -> float: ...
    @property
    def beta_fast(self) -> float: ...
    @property
    def beta_slow(self) -> float: ...
    @property
    def attention_factor(self) -> float | None: ...
    @property
    def mscale(self) -> float: ...
    @property
    def mscale_all_dim(self) -> float: ...
    @property
    def truncate(self) -> bool: ...


class Rotary(nn.Module):
    """Angles of one model.

    Args:
        context_length: the checkpoint's trained length; dynamic NTK begins beyond it.

    Raises:
        ModelError: a kind that is not known.
    """

    def __init__(
        self,
        head_dim: int,
        numbers: RopeNumbers,
        context_length: int,
        ops: Ops,
        device: torch.device,
    ) -> None:
        super().__init__()
        kinds = {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
        kinds["dynamic"] = _plain
        if numbers.kind not in kinds:
            raise ModelError(f"RoPE of kind {numbers.kind!r} is not one of: {', '.join(kinds)}")
        self.ops = ops
        self.head_dim = head_dim
        self.numbers = numbers
        self.context_length = context_length
        self.magnitude = _yarn_magnitude(numbers) if numbers.kind == "yarn" else 1.0
        self.frequencies = kinds[numbers.kind](head_dim, numbers).to(device)  # [head_dim/2] fp32

    def divide(self, divisors: Tensor) -> None:
        """Slow each frequency by a factor that the checkpoint gives. divisors: [head_dim/2]"""
        if divisors.shape != self.frequencies.shape:
            raise ModelError(
                f"the checkpoint has {divisors.numel()} RoPE factors, heads of {self.head_dim} "
                f"need {self.frequencies.numel()}"
            )
        self.frequencies = self.frequencies / divisors.to(self.frequencies)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [tokens] int64; returns cos, sin [tokens, head_dim/2] fp32."""
        if self.numbers.kind != "dynamic":
            return self.ops.rotary_angles(positions, self.frequencies, self.magnitude)
        angles = positions.unsqueeze(1).float() * self._stretched(positions)
        return angles.cos(), angles.sin()

    def _stretched(self, positions: Tensor) -> Tensor:
        """Frequencies of each position by the NTK rule. [tokens, head_dim/2]"""
        lengths = (positions + 1).clamp(min=self.context_length).double()
        factor, dim = self.numbers.factor, self.head_dim
        growth = factor * lengths / self.context_length - (factor - 1)
        theta = self.numbers.theta * growth ** (dim / (dim - 2))
        return (theta.unsqueeze(1) ** -_exponents(dim).double().to(positions.device)).float()


def _exponents(head_dim: int) -> Tensor:
    """2i / head_dim for every pair i. [head_dim/2] fp32"""
    return torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim


def _plain(head_dim: int, numbers: RopeNumbers) -> Tensor:
    return 1.0 / numbers.theta ** _exponents(head_dim)


def _linear(head_dim: int, numbers: RopeNumbers) -> Tensor:
    return _plain(head_dim, numbers) / numbers.factor


def _llama3(head_dim: int, numbers: RopeNumbers) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, the ones between are mixed."""
    plain = _plain(head_dim, numbers)
    turns = numbers.original_length * plain / (2 * math.pi)  # within the trained length
    low, high = numbers.low_freq_factor, numbers.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / numbers.factor + kept * plain


def _yarn(head_dim: int, numbers: RopeNumbers) -> Tensor:
    """Dimensions that turn often keep their frequency, slow ones are divided, a ramp between."""

    def dimension_of(turns: float) -> float:
        length = numbers.original_length / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(numbers.theta))

    low, high = dimension_of(numbers.beta_fast), dimension_of(numbers.beta_slow)
    if numbers.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    divided = ((torch.arange(head_dim // 2, dtype=torch.float) - low) / width).clamp(0, 1)
    plain = _plain(head_dim, numbers)
    return plain / numbers.factor * divided + plain * (1 - divided)


def _yarn_magnitude(numbers: RopeNumbers) -> float:
    """Factor on cos and sin that keeps the softmax as sharp as in training (YaRN, section 3.4)."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(numbers.factor) + 1.0 if numbers.factor > 1 else 1.0

    if numbers.attention_factor is not None:
        return numbers.attention_factor
    if numbers.mscale and numbers.mscale_all_dim:
        return magnitude(numbers.mscale) / magnitude(numbers.mscale_all_dim)
    return magnitude(1.0)
