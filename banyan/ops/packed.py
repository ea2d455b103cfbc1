"""Weights in the form of the kernels that use them, chosen once at load. Letters: `ops/api.py`."""

from typing import Protocol

from torch import Tensor


class PackedLinear(Protocol):
    """A weight in the form of the kernel that multiplies with it, chosen once at load."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x·Wᵀ + bias.

        x: [tokens, in] T; bias: [out] T or None.
        returns: [tokens, out] T, accumulated in fp32 or better.
        """
        ...


class PackedEmbedding(Protocol):
    """This rank's rows of an embedding, in the form of the kernel that reads them."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """The row of each token; ids of other ranks give zeros.

        tokens: [tokens] int64.
        returns: [tokens, dim] T.
        """
        ...


class PackedHeadLinear(Protocol):
    """A matrix for each head, in the form of the kernel that multiplies with them."""

    def __call__(self, x: Tensor) -> Tensor:
        """Each head through a matrix of its own: x[t, h] · weight[h]ᵀ.

        x: [tokens, heads, in] T, tokens and heads may lie apart.
        returns: [tokens, heads, out] T, summed in fp32 or better.
        """
        ...
