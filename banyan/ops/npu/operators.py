"""The operators of an Ascend NPU, one function each: the only place that calls them.

Names and arguments are torch_npu's; what the kernels beside do not use is left out. With checks on,
each call is held against its contract first.
"""

from typing import Any

import torch
from torch import Tensor

from banyan.ops.npu import contracts
from banyan.ops.npu.contracts import ALL, BAND, CAUSAL, MASK_SIZE

_ENDLESS = (1 << 31) - 1


class Operators:
    """
    Args:
        is_checked: hold each call against its contract; costs microseconds per call.
        namespace: what has the operators, where it is not torch_npu.
    """

    def __init__(self, is_checked: bool, namespace: Any = None) -> None:
        self._is_checked = is_checked
        self._npu = torch.ops.npu if namespace is None else namespace
        self._triangles: dict[torch.device, Tensor] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._is_checked:
            contracts.rms_norm(x, weight)
        return self._npu.npu_rms_norm(x, weight, eps)[0]

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if self._is_checked:
            contracts.add_rms_norm(x, residual, weight)
        normed, _, total = self._npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    def swiglu(self, gate_up: Tensor) -> Tensor:
        if self._is_checked:
            contracts.swiglu(gate_up)
        return self._npu.npu_swiglu(gate_up, dim=-1)

    def rotary_mul(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [1, tokens, heads, dim]; cos, sin: [1, tokens, 1, dim], both halves alike."""
        if self._is_checked:
            contracts.rotary_mul(x, cos, sin)
        return self._npu.npu_rotary_mul(x, cos, sin, rotary_mode="half")

    def scatter(self, pages: Tensor, indices: Tensor, updates: Tensor) -> None:
        """pages: [places, …], changed; indices: [n, 1]; updates: [n, …]."""
        if self._is_checked:
            contracts.scatter_nd_update(pages, indices, updates)
        self._npu.npu_scatter_nd_update_(pages, indices, updates)

    def attend_single(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor,
        lengths: list[int],
        kv_heads: int,
        scale: float,
    ) -> Tensor:
        """Rows of one token each. query: [rows, 1, heads, dim]; key, value: [pages, page size,
        kv_heads · dim]; table: [rows, pages of a row]; lengths: keys of each row."""
        return self._attend(query, key, value, table, None, lengths, kv_heads, scale, "BSND", ALL)

    def attend_row(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor,
        length: int,
        kv_heads: int,
        scale: float,
        window: int,
    ) -> Tensor:
        """One row of many tokens, the last ones of its `length`. query: [1, tokens, heads, dim]."""
        mode = BAND if window else CAUSAL
        return self._attend(
            query, key, value, table, None, [length], kv_heads, scale, "BSND", mode, window
        )

    def attend_together(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor,
        ends: list[int],
        lengths: list[int],
        kv_heads: int,
        scale: float,
        window: int,
    ) -> Tensor:
        """Rows of any count, one after another. query: [tokens, heads, dim]; ends: the token after
        the last one of each row."""
        mode = BAND if window else CAUSAL
        return self._attend(
            query, key, value, table, ends, lengths, kv_heads, scale, "TND", mode, window
        )

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor,
        ends: list[int] | None,
        lengths: list[int],
        kv_heads: int,
        scale: float,
        layout: str,
        mode: int,
        window: int = 0,
    ) -> Tensor:
        # A replayed graph gets new lengths for what was given by keyword, and for nothing else.
        given = {
            "atten_mask": None if mode == ALL else self._triangle(query.device),
            "actual_seq_lengths": ends,
            "actual_seq_lengths_kv": lengths,
            "block_table": table,
            "num_heads": query.shape[-2],
            "num_key_value_heads": kv_heads,
            "input_layout": layout,
            "sparse_mode": mode,
            "block_size": key.shape[1],
        }
        if self._is_checked:
            contracts.fused_infer_attention(query, key, value, **given)
        before = {"pre_tokens": window - 1, "next_tokens": 0} if window else {}
        attend = self._npu.npu_fused_infer_attention_score
        return attend(query, key, value, scale=scale, **before, **given)[0]

    def _triangle(self, device: torch.device) -> Tensor:
        """What no position sees: everything above the diagonal."""
        if device not in self._triangles:
            whole = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool)
            self._triangles[device] = whole.triu(1).to(device)
        return self._triangles[device]
