"""Low-rank adapters of one projection as a device keeps them whose memory is not the host's: those
of all adapters that may be loaded, side by side in memory that stays where it is.

So a product is made with all of them at once, and what others than a token's own have made of it is
put out before the second one. Shapes depend on nothing but how many tokens there are: a graph finds
other adapters there later, and nothing asks the device for numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.base.errors import ConfigError
from banyan.ops.host import sent


@dataclass(frozen=True)
class Matrices:
    """What an adapter adds to one part of a projection: up · (down · x).

    Attributes:
        first: the first of the part's outputs.
        down: [rank, in]; up: [outputs, rank]; fp32, the scale is in `up`.
    """

    first: int
    down: Tensor
    up: Tensor


class AdapterStack:
    """
    Args:
        inputs: of the projection on this rank.
        outputs: of each part of it.
        rank: highest one of an adapter.
        capacity: how many adapters there are at most.
        dtype: of all numbers.
    """

    def __init__(
        self,
        inputs: int,
        outputs: Sequence[int],
        rank: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.outputs = tuple(outputs)
        self.shape = len(outputs), capacity, rank
        self.down = zeros(*self.shape, inputs)
        """[parts, capacity, rank, in]."""
        self.up = zeros(capacity * rank * sum(outputs))
        """Of all parts, one after another: [capacity, rank, outputs] of each."""
        self._firsts = [sum(outputs[:at]) for at in range(len(outputs))]
        ups = self.up.split([capacity * rank * size for size in outputs])
        self._ups = [up.view(capacity, rank, -1) for up in ups]

    @property
    def size_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def place(self, parts: Sequence[Matrices]) -> list[Tensor]:
        """The tensors of one adapter, on the host: [parts, rank, in], and of each part
        [rank, outputs].

        Raises:
            ConfigError: a number is too large for the type.
        """
        dtype = self.down.dtype
        assert len({part.first for part in parts}) == len(parts)
        down = torch.zeros(self.down[:, 0].shape, dtype=dtype)
        ups = [torch.zeros(up[0].shape, dtype=dtype) for up in self._ups]
        for part in parts:
            at, rank = self._firsts.index(part.first), len(part.down)
            down[at, :rank] = part.down
            ups[at][:rank] = part.up.t()
        for made in (down, *ups):
            if not made.isfinite().all():  # times nothing it would be no number, for all tokens
                raise ConfigError(
                    f"an adapter has numbers that are too large for {str(dtype)[6:]}",
                    hint="give --dtype bfloat16, or merge it into the weights",
                )
        return [down, *ups]

    def enter(self, number: int, placed: Sequence[Tensor]) -> None:
        """Take what `place` has made in the place of what had the number, from 1 on; () lets go of
        it. In the order of the stream at hand."""
        mine = [self.down[:, number - 1], *(up[number - 1] for up in self._ups)]
        if not placed:
            for tensor in mine:
                tensor.zero_()
        for tensor, values in zip(mine, placed, strict=bool(placed)):
            tensor.copy_(sent(values, tensor.device))

    def add(self, out: Tensor, x: Tensor, others: Tensor) -> None:
        """As `adapt` of ops/lora.py.

        out: [tokens, out]; x: [tokens, in]; others: [any, capacity] bool, of the step's tokens the
            adapters that are not theirs.
        """
        tokens, parts, ranks = len(x), self.shape[0], self.shape[1] * self.shape[2]
        made = x.to(self.down.dtype) @ self.down.flatten(0, 2).t()
        made = made.view(tokens, *self.shape)
        made = made.masked_fill(others[:tokens, None, :, None], 0).view(tokens, parts, ranks)
        for at, (first, up) in enumerate(zip(self._firsts, self._ups, strict=True)):
            out[:, first : first + up.shape[2]].addmm_(made[:, at], up.view(ranks, -1))
