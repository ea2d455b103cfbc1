"""The operators of an Ascend NPU, one method each: the only place that calls torch_npu and deep_ep.

Names and arguments come from the libraries; arguments that no kernel here uses are left out.
With checks on, each call is checked against its contract first.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from banyan.ascend.ops import contracts, latent_contracts, product_contracts
from banyan.ascend.ops.contracts import ALL, BAND, CAUSAL, FRACTAL_AXES, MASK_SIZE
from banyan.ascend.ops.latent_contracts import FRACTAL_PAGES, PLAIN_PAGES, PrologWeights
from banyan.ascend.ops.product_contracts import COLUMN_STEPS, ROW_STEP
from banyan.base.log import Once, logger
from banyan.ops.experts_api import Ranks
from banyan.platform.expert_exchange import Dispatch, FusedDispatch


class LatentOperators:
    """
    Args:
        is_checked, npu: as of `Operators`, and what has them.
    """

    def __init__(self, is_checked: bool, npu: Any) -> None:
        self._is_checked = is_checked
        self._npu = npu

    def mla_prolog(
        self,
        x: Tensor,
        units: Tensor | None,
        weights: PrologWeights,
        gammas: tuple[Tensor, Tensor],
        turns: tuple[Tensor, Tensor],
        pages: tuple[Tensor, Tensor],
        places: Tensor,
        eps: tuple[float, float],
        has_norm: bool = False,
        mode: str = PLAIN_PAGES,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All that comes before latent attention; pages are written. Returns queries in the latent
        space [tokens, heads, 512], turned ones [tokens, heads, 64], and with `has_norm` squeezed
        ones [tokens, 1536] with their units [tokens, 1] where they are int8. Arguments as in
        `latent_contracts.mla_prolog`; turns: sin, cos; mode: how
        pages lie."""
        if self._is_checked:
            given = (x, units, weights, gammas, turns, pages, places)
            latent_contracts.mla_prolog(*given, mode)
        squeeze, query, latent = weights.scales
        found = self._npu.npu_mla_prolog_v3(
            x,
            weights.squeeze,
            weights.query,
            weights.keys,
            weights.latent,
            *gammas,
            *turns,
            *pages,
            cache_index=places,
            dequant_scale_x=units,
            dequant_scale_w_dq=squeeze,
            dequant_scale_w_uq_qr=query,
            dequant_scale_w_dkv_kr=latent,
            rmsnorm_epsilon_cq=eps[0],
            rmsnorm_epsilon_ckv=eps[1],
            cache_mode=mode,
            query_norm_flag=has_norm,
            weight_quant_mode=weights.mode,
        )
        return found[0], found[1], found[3], found[4]

    def scatter_pages(
        self, latents: Tensor, keys: Tensor, pages: tuple[Tensor, Tensor], places: Tensor
    ) -> None:
        """Write what is kept of each token into fractal pages, as `latent_contracts.py` has
        them."""
        if self._is_checked:
            latent_contracts.scatter_pages(latents, keys, pages, places)
        self._npu.npu_scatter_pa_kv_cache(latents, keys, *pages, places, cache_mode=FRACTAL_PAGES)


class FourBitOperators:
    """
    Args:
        is_checked, npu: as of `Operators`, and what has them.
    """

    def __init__(self, is_checked: bool, npu: Any) -> None:
        self._is_checked = is_checked
        self._npu = npu

    def matmul(
        self,
        x: Tensor,
        columns: Tensor,
        scale: Tensor,
        units: Tensor,
        lift: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """((x - 8) · columns · scale + lift) · units, [tokens, out]."""
        if self._is_checked:
            product_contracts.four_bit_matmul(x, columns, scale, units, lift, dtype)
        given = {"offset": lift, "pertoken_scale": units, "output_dtype": dtype}
        return self._npu.npu_quant_matmul(x, columns, scale, **given)

    def grouped_matmul(
        self,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        scale: Tensor,
        units: Tensor,
        lift: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """The same, each row with the weights of its group, [rows, out]."""
        if self._is_checked:
            product_contracts.grouped_four_bit_matmul(x, weight, counts, scale, units, lift, dtype)
        return self._npu.npu_grouped_matmul(
            [x],
            [weight],
            bias=[lift],
            scale=[scale],
            per_token_scale=[units],
            group_list=counts,
            split_item=2,
            group_type=0,
            group_list_type=1,
            output_dtype=dtype,
        )[0]


log = logger(__name__)
_BY_ROW = 2
"""Rows are rounded to int8 on their way, each with a unit of its own."""
_FRACTAL = 29
"""The number of the form NZ."""
_NEWER_NAMES = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
}
"""Arguments that the second version of attention, the one with sinks, calls otherwise."""


@dataclass(frozen=True)
class Sent:
    """What came to this rank in an exchange.

    Attributes:
        rows: by expert, and then anything; of int8 where they have units.
        counts: rows of each expert here.
        places, received, weights: for the way back.
    """

    rows: Tensor
    units: Tensor | None
    counts: Tensor
    places: Tensor
    received: Tensor
    weights: Tensor | None = None


class AttentionOperators:
    """Attention over pages: of keys and values, of latents, and of chosen positions.

    Args:
        is_checked, npu: as for `LatentOperators`.
    """

    def __init__(self, is_checked: bool, npu: Any) -> None:
        self._is_checked = is_checked
        self._npu = npu
        self._triangles: dict[torch.device, Tensor] = {}
        self._rows: tuple[torch.device, list[int], list[int], Tensor] | None = None

    def attend_single(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor,
        lengths: list[int],
        kv_heads: int,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Rows of one token each. query: [rows, 1, heads, dim]; key, value: [pages, page size,
        kv_heads · dim]; table: [rows, pages of a row]; lengths: keys of each row; sinks: [heads]
        bf16."""
        given = _given(query, key, table, None, lengths, kv_heads, "BSND", ALL)
        return self._attend(query, key, value, scale, given, sinks=sinks)

    def attend_rows(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor,
        lengths: list[int],
        kv_heads: int,
        scale: float,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Rows of as many tokens each, more than one, the last ones of their `lengths`.
        query: [rows, tokens, heads, dim]."""
        mode = BAND if window else CAUSAL
        given = _given(query, key, table, None, lengths, kv_heads, "BSND", mode)
        return self._attend(query, key, value, scale, given, window, sinks)

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
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Rows of any count, one after another. query: [tokens, heads, dim]; ends: the token after
        the last one of each row."""
        mode = BAND if window else CAUSAL
        given = _given(query, key, table, ends, lengths, kv_heads, "TND", mode)
        return self._attend(query, key, value, scale, given, window, sinks)

    def attend_latents(
        self,
        query: Tensor,
        query_rope: Tensor,
        latents: Tensor,
        key_rope: Tensor,
        table: Tensor,
        ends: list[int] | None,
        lengths: list[int],
        scale: float,
    ) -> Tensor:
        """Attention whose keys are latents [pages, page size, 512] and turned keys [.., 64], and
        whose values are the latents; of fractal pages [pages, 1, 32 and 4, 128, 16]. query: [rows,
        1, heads, 512] without `ends`, else [tokens, heads, 512]; query_rope: as query, 64 wide."""
        how = ("BSND", ALL) if ends is None else ("TND", CAUSAL)
        given = _given(query, latents, table, ends, lengths, 1, *how)
        given |= {"query_rope": query_rope, "key_rope": key_rope}
        return self._attend(query, latents, latents, scale, given)

    def choose_positions(
        self,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        table: Tensor,
        ends: Tensor,
        lengths: Tensor,
        top: int,
    ) -> Tensor:
        """The best positions of each token first, then -1; [tokens, 1, top]. query: [tokens, heads,
        128]; key: [pages, page size, 1, 128]; weights: [tokens, heads]; ends: the token after the
        last one of each row, lengths: keys of each row, both of int32 on the device."""
        if self._is_checked:
            rows = (ends, lengths, table)
            latent_contracts.lightning_indexer(query, key, weights, *rows, top)
        return self._npu.npu_lightning_indexer(
            query,
            key,
            weights,
            actual_seq_lengths_query=ends,
            actual_seq_lengths_key=lengths,
            block_table=table,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=top,
            sparse_mode=3,
        )[0]

    def attend_chosen(
        self,
        query: Tensor,
        query_rope: Tensor,
        latents: Tensor,
        key_rope: Tensor,
        chosen: Tensor,
        table: Tensor,
        ends: Tensor,
        lengths: Tensor,
        scale: float,
    ) -> Tensor:
        """As `attend_latents` over the positions that `choose_positions` gives. latents, key_rope:
        [pages, page size, 1, 512 and 64]; the others as there."""
        if self._is_checked:
            latent_contracts.sparse_flash_attention(
                query, query_rope, latents, key_rope, chosen, ends, lengths, table
            )
        return self._npu.npu_sparse_flash_attention(
            query,
            latents,
            latents,
            chosen,
            scale,
            block_table=table,
            actual_seq_lengths_query=ends,
            actual_seq_lengths_kv=lengths,
            query_rope=query_rope,
            key_rope=key_rope,
            sparse_block_size=1,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=3,
            attention_mode=2,
        )[0]

    def ends_of(
        self, device: torch.device, row_starts: Tensor, context_lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The ends and the lengths of a step's rows, as the operators of sparse attention take
        them: brought once for all layers, or made of what is on the device already."""
        if not row_starts.is_cpu:  # a graph reads there what holds for its step
            ends = row_starts[1:]
            return ends, context_lengths + ends - row_starts[:-1]
        starts, contexts = row_starts.tolist(), context_lengths.tolist()
        if self._rows is None or self._rows[:3] != (device, starts, contexts):
            ends = row_starts[1:]
            packed = torch.empty(2, len(contexts), dtype=torch.int32, pin_memory=True)
            packed.copy_(torch.stack([ends, context_lengths + ends - row_starts[:-1]]))
            there = packed.to(device, non_blocking=True)
            self._rows = (device, starts, contexts, there)
        return self._rows[3][0], self._rows[3][1]

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        given: dict[str, Any],
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if given["sparse_mode"] != ALL:
            given["atten_mask"] = self._triangle(query.device)
        if self._is_checked:
            contracts.fused_infer_attention(query, key, value, learnable_sink=sinks, **given)
        given["scale"] = scale
        if window:
            given |= {"pre_tokens": window - 1, "next_tokens": 0}
        if sinks is None:
            return self._npu.npu_fused_infer_attention_score(query, key, value, **given)[0]
        given = {_NEWER_NAMES.get(name, name): each for name, each in given.items()}
        attend = self._npu.npu_fused_infer_attention_score_v2
        return attend(query, key, value, learnable_sink=sinks, **given)[0]

    def _triangle(self, device: torch.device) -> Tensor:
        """What no position sees: everything above the diagonal."""
        if device not in self._triangles:
            whole = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool)
            self._triangles[device] = whole.triu(1).to(device)
        return self._triangles[device]


class ExpertOperators:
    """Experts: which rows they get, their products, exchanges of rows between ranks, and the sums.

    Args:
        is_checked, npu: as for `LatentOperators`.
    """

    def __init__(self, is_checked: bool, npu: Any) -> None:
        self._is_checked = is_checked
        self._npu = npu

    def init_routing(
        self, x: Tensor, ids: Tensor, first: int, last: int, experts: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of x for each pair of a token and an expert from `first` to before `last`, by
        expert, and then anything; the row of each pair, token after token, -1 of other experts; how
        many rows each expert has. x: [tokens, dim]; ids: [tokens, per_token] of int32.
        """
        if self._is_checked:
            product_contracts.init_routing(x, ids, experts, first, last)
        return self._npu.npu_moe_init_routing_v2(
            x,
            ids,
            active_num=ids.numel(),
            expert_num=experts,
            drop_pad_mode=0,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[first, last],
            quant_mode=-1,
            row_idx_type=0,
        )[:3]

    def dispatch(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        ranks: Ranks,
        experts: int,
        limits: Dispatch,
        is_rounded: bool = False,
    ) -> Sent:
        """Rows to the ranks of their experts, an exchange of a fixed size: all ranks bring as many.
        x: [tokens, dim]; ids: [tokens, per_token] of int32; weights: of fp32; experts: of all
        ranks; is_rounded: they travel as int8, with a unit of each."""
        if self._is_checked:
            product_contracts.distribute_dispatch(x, ids, weights, ranks, experts, limits)
        rows, units, places, counts, received, _, scales = self._npu.npu_moe_distribute_dispatch_v2(
            x,
            ids,
            ranks.name,
            ranks.size,
            ranks.rank,
            experts,
            expert_scales=weights if limits.takes_weights else None,
            quant_mode=_BY_ROW if is_rounded else 0,
            global_bs=0,
            expert_token_nums_type=1,
        )
        sent = Sent(rows, units if is_rounded else None, counts, places, received)
        return replace(sent, weights=scales) if limits.takes_weights else sent

    def combine(
        self,
        rows: Tensor,
        sent: Sent,
        ids: Tensor,
        weights: Tensor,
        ranks: Ranks,
        experts: int,
        limits: Dispatch,
    ) -> Tensor:
        """The way back of what experts have made of the rows: the sum of each token's by weight,
        [tokens, dim]. weights: [tokens, per_token] of fp32; the others as for `dispatch`."""
        given = (rows, ids, sent.places, sent.received, weights)
        if self._is_checked:
            product_contracts.distribute_combine(*given, ranks, experts, limits)
        return self._npu.npu_moe_distribute_combine_v2(
            *given,
            ranks.name,
            ranks.size,
            ranks.rank,
            experts,
            expand_scales=sent.weights,
            global_bs=0,
        )

    def grouped_matmul(self, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """x: [rows, in], rows of a group together; weight: [groups, in, out]; counts: [groups]."""
        if self._is_checked:
            product_contracts.grouped_matmul(x, weight, counts)
        return self._npu.npu_grouped_matmul(
            [x], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1
        )[0]

    def grouped_quant_matmul(
        self,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        scale: Tensor,
        units: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """As `grouped_matmul`, of int8 numbers, times scale and units: scale [groups, out] is of
        bf16 where `dtype` is, else of fp32; units: [rows] fp32."""
        if self._is_checked:
            product_contracts.grouped_quant_matmul(x, weight, counts, scale, units, dtype)
        return self._npu.npu_grouped_matmul(
            [x],
            [weight],
            scale=[scale],
            per_token_scale=[units],
            group_list=counts,
            split_item=2,
            group_type=0,
            group_list_type=1,
            output_dtype=dtype,
        )[0]

    def token_unpermute(self, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """The sum of each token's rows by weight. places: as `init_routing` gives them."""
        if self._is_checked:
            product_contracts.token_unpermute(rows, places, weights)
        return self._npu.npu_moe_token_unpermute(rows, places, probs=weights)


class Operators:
    """
    Args:
        is_checked: hold each call against its contract; costs microseconds per call.
        namespace: what has the operators, where it is not torch_npu.
        keeps_plain: weights stay in the order of their numbers.
    """

    def __init__(self, is_checked: bool, namespace: Any = None, keeps_plain: bool = False) -> None:
        self._is_checked = is_checked
        self.keeps_plain = keeps_plain
        self.warn = Once(log)
        self._npu = torch.ops.npu if namespace is None else namespace
        self.latents = LatentOperators(is_checked, self._npu)
        self.four_bits = FourBitOperators(is_checked, self._npu)
        self.attention = AttentionOperators(is_checked, self._npu)
        self.experts = ExpertOperators(is_checked, self._npu)

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

    def dynamic_quant(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [tokens, dim]; returns int8 numbers of its shape, and the unit of each token, fp32."""
        if self._is_checked:
            product_contracts.dynamic_quant(x)
        return self._npu.npu_dynamic_quant(x)

    def quantize(self, x: Tensor, inverse: Tensor, offset: Tensor) -> Tensor:
        """x · inverse + offset as int8. x: [tokens, dim]; inverse, offset: [1]."""
        if self._is_checked:
            product_contracts.quantize(x, inverse, offset)
        return self._npu.npu_quantize(x, inverse, offset, torch.qint8, -1, False)

    def cast_fractal(self, columns: Tensor) -> Tensor:
        """In the form that products read best; as it is where its sizes do not allow that, or where
        weights are to stay plain. columns: [..., in, out] int8 or of half precision."""
        step = COLUMN_STEPS.get(columns.dtype, 1)
        if self.keeps_plain or columns.shape[-2] % ROW_STEP or columns.shape[-1] % step:
            return columns
        if self._is_checked:
            product_contracts.format_cast(columns)
        return self._npu.npu_format_cast(columns, _FRACTAL)

    def quant_matmul(
        self,
        x: Tensor,
        columns: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        pertoken_scale: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """(x · columns + bias) · scale · pertoken_scale. x: [tokens, in] int8; columns: [in, out]
        int8; scale: [out] fp32; pertoken_scale: [tokens] fp32; bias: [out] int32."""
        if self._is_checked:
            product_contracts.quant_matmul(x, columns, scale, dtype, pertoken_scale, bias)
        given = {"pertoken_scale": pertoken_scale, "bias": bias, "output_dtype": dtype}
        return self._npu.npu_quant_matmul(x, columns, scale, **given)


def _given(
    query: Tensor,
    key: Tensor,
    table: Tensor,
    ends: list[int] | None,
    lengths: list[int],
    kv_heads: int,
    layout: str,
    mode: int,
) -> dict[str, Any]:
    """The arguments of attention by name: a replayed graph gets new lengths for what was given so,
    and for nothing else."""
    return {
        "atten_mask": None,
        "actual_seq_lengths": ends,
        "actual_seq_lengths_kv": lengths,
        "block_table": table,
        "num_heads": query.shape[-2],
        "num_key_value_heads": kv_heads,
        "input_layout": layout,
        "sparse_mode": mode,
        "block_size": key.shape[3] if key.dim() == FRACTAL_AXES else key.shape[1],
    }


BY_ROWS = 2
"""The mode whose operator takes room for rows, instead of tokens of a rank."""
_INT8 = 1


class _NamedGroup:
    """What the library asks of a group of ranks: who is in it, and its name."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def rank(self) -> int:
        return self._ranks.rank

    def size(self) -> int:
        return self._ranks.size

    def _get_backend(self, device: torch.device) -> "_NamedGroup":
        return self

    def get_hccl_comm_name(self, rank: int) -> str:
        return self._ranks.name


class Fuser:
    """
    Args:
        library: deep_ep, or its emulation.
        mode: which of its operators, 1 or 2.
        limits: of that one.
        is_checked: as for `Operators`.
    """

    def __init__(self, library: Any, mode: int, limits: FusedDispatch, is_checked: bool) -> None:
        self.mode, self.limits = mode, limits
        self._library, self._is_checked = library, is_checked
        self._buffers: dict[str, Any] = {}

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: tuple[Tensor, Tensor],
        down: tuple[Tensor, Tensor],
        ranks: Ranks,
        experts: int,
    ) -> Tensor:
        """The sum over a token's experts of weight · down(silu(gate(x)) · up(x)). All ranks bring
        as many tokens. x: [tokens, dim] bf16; ids: [tokens, per_token] int64; weights: as ids,
        fp32; gate_up, down: weights of 8 bits and their scales, as `FusedExperts` lays them out;
        experts: of all ranks. returns: [tokens, dim] bf16."""
        tokens, per_token = ids.shape
        given = (x, ids, weights, *gate_up, *down)
        if self._is_checked:
            product_contracts.fused_deep_moe(*given, ranks, experts, self.mode, self.limits)
        # The second operator has room for so many rows, which is what may come to one rank at most.
        room = tokens * per_token * ranks.size if self.mode == BY_ROWS else tokens
        return self._buffer(ranks).fused_deep_moe(
            *given,
            num_max_dispatch_tokens_per_rank=room,
            num_experts=experts,
            quant_mode=_INT8,
            fuse_mode=self.mode,
        )[0]

    def _buffer(self, ranks: Ranks) -> Any:
        if ranks.name not in self._buffers:
            self._buffers[ranks.name] = self._library.Buffer(
                _NamedGroup(ranks), low_latency_mode=True
            )
        return self._buffers[ranks.name]
