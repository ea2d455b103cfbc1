"""KVStore: the bytes of the pages, one tensor of keys and one of values per layer.

Knows pages by number only; who owns a page is the engine's business.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from banyan.config.card import ModelCard
from banyan.messages.plan import PageCopy
from banyan.ops.pages import stored_width


@dataclass(frozen=True)
class GroupLayout:
    """Layers that share one page geometry.

    Attributes:
        page_size: tokens per page.
        num_pages: pages of the group, the padding page 0 included.
        layers: indices of the model's layers whose K and V lie in these pages.
    """

    page_size: int
    num_pages: int
    layers: tuple[int, ...]


class KVStore:
    """Page tensors of one rank: [num_pages, page_size, kv_heads, stored_width] per layer.

    Args:
        kv_heads: kv heads on this rank.
        dtype: dtype of the stored K and V.
    """

    def __init__(
        self,
        groups: tuple[GroupLayout, ...],
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.groups = groups
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        for group in groups:
            width = stored_width(head_dim, dtype)
            shape = (group.num_pages, group.page_size, kv_heads, width)
            for layer in group.layers:
                self._keys[layer] = _zeros(shape, dtype, device)
                self._values[layer] = _zeros(shape, dtype, device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Pages of K and of V of one layer."""
        return self._keys[index], self._values[index]

    def copy(self, copies: list[PageCopy], when: str) -> None:
        """Carry out the copies marked `when` ("before" | "after"), in the order of the plan."""
        for copy in copies:
            if copy.when != when:
                continue
            for layer in self.groups[copy.group].layers:
                for pages in self.layer(layer):
                    pages[copy.dst].copy_(pages[copy.src])

    @staticmethod
    def bytes_per_page(
        card: ModelCard, num_layers: int, page_size: int, dtype: torch.dtype, tp: int
    ) -> int:
        """Bytes that one page of a group of `num_layers` layers takes on one of `tp` ranks."""
        kv_heads = max(1, card.num_kv_heads // tp)
        token_bytes = 2 * kv_heads * stored_width(card.head_dim, dtype) * dtype.itemsize
        return num_layers * page_size * token_bytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed pages. On the host they take memory only once written: calloc maps the zero page."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
