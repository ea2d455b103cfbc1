"""What the NPU's own operators compute, and what they refuse.

Schemas are torch_npu's. Each call is held against its contract (banyan/ascend/ops/contracts.py) and
then, since nothing forbids it here, against what lies in memory: page numbers, places and masks
that a real device would follow without a word. Numbers are computed in fp32 and rounded once.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from banyan.ascend.ops import contracts
from banyan.ascend.ops.contracts import BAND, MASK_SIZE, require
from tests.ascend.emulation import (
    dispatch_operators,
    expert_operators,
    fused_operators,
    latent_operators,
    quant_operators,
    sparse_operators,
)
from tests.ascend.emulation.groups import Exchanges

_FIA = "npu_fused_infer_attention_score"
_ENDLESS = (1 << 31) - 1
_FIA2 = f"{_FIA}_v2"
_OLDER_NAMES = {
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
}
SCHEMAS = {
    "npu_rms_norm": "(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_add_rms_norm": "(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) "
    "-> (Tensor, Tensor, Tensor)",
    "npu_swiglu": "(Tensor input, int dim=-1) -> Tensor",
    "npu_rotary_mul": "(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', "
    "Tensor? rotate=None) -> Tensor",
    "npu_scatter_nd_update_": "(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)",
    _FIA: "(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, "
    "Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, "
    "SymInt[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, "
    "Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
    "Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, "
    "Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, "
    "Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, "
    "Tensor? block_table=None, Tensor? query_padding_size=None, Tensor? kv_padding_size=None, "
    "Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, "
    "SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, "
    "Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, "
    "int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', "
    "int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0, "
    "int antiquant_mode=0, int key_antiquant_mode=0, int value_antiquant_mode=0, "
    "bool softmax_lse_flag=False) -> (Tensor, Tensor)",
    _FIA2: "(Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None, "
    "Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None, "
    "SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, "
    "Tensor? block_table=None, Tensor? dequant_scale_query=None, "
    "Tensor? dequant_scale_key=None, Tensor? dequant_offset_key=None, "
    "Tensor? dequant_scale_value=None, Tensor? dequant_offset_value=None, "
    "Tensor? dequant_scale_key_rope=None, Tensor? quant_scale_out=None, "
    "Tensor? quant_offset_out=None, Tensor? quant_scale_p=None, Tensor? learnable_sink=None, "
    "int num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1.0, "
    "int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', "
    "int sparse_mode=0, int block_size=0, int query_quant_mode=0, int key_quant_mode=0, "
    "int value_quant_mode=0, int inner_precise=0, bool return_softmax_lse=False, "
    "int? query_dtype=None, int? key_dtype=None, int? value_dtype=None, "
    "int? query_rope_dtype=None, int? key_rope_dtype=None, int? key_shared_prefix_dtype=None, "
    "int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, "
    "int? dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None, "
    "int? dequant_scale_key_rope_dtype=None, int? out_dtype=None) -> (Tensor, Tensor)",
    **expert_operators.SCHEMAS,
    **dispatch_operators.SCHEMAS,
    **latent_operators.SCHEMAS,
    **quant_operators.SCHEMAS,
    **sparse_operators.SCHEMAS,
}


@cache
def register(core: ModuleType, exchanges: Exchanges, chip: str) -> list[torch.library.Library]:
    """Define the operators and what they do; they last as long as what is returned."""
    library = torch.library.Library("npu", "DEF")
    computing = Computing(core)
    distributed = dispatch_operators.Distributed(core, exchanges, chip)
    products = quant_operators.Products(core)
    others = {
        **dict.fromkeys(dispatch_operators.SCHEMAS, distributed),
        **dict.fromkeys(expert_operators.SCHEMAS, expert_operators.Experts(core)),
        **dict.fromkeys(quant_operators.SCHEMAS, products),
        **dict.fromkeys(latent_operators.SCHEMAS, latent_operators.Latents(core, products.fractal)),
        **dict.fromkeys(sparse_operators.SCHEMAS, sparse_operators.Sparse(core)),
    }
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, getattr(others.get(name, computing), name), "PrivateUse1")
    fusing = torch.library.Library("deep_ep", "DEF")
    fusing.define(fused_operators.SCHEMA)
    fused = fused_operators.Fused(core, distributed, products, chip)
    fusing.impl("fused_deep_moe", fused.fused_deep_moe, "PrivateUse1")
    return [library, fusing]


class Computing:
    """The operators by their names."""

    def __init__(self, core: ModuleType) -> None:
        self._core = core
        self._host: Callable[[Tensor], Tensor] = core.host_alias
        self._device: Callable[[Tensor, int], Tensor] = core.device_alias

    def npu_rms_norm(self, x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, ...]:
        contracts.rms_norm(x, gamma)
        normed, factor = self._norm(self._host(x).float(), gamma, epsilon)
        return self._like(x, normed.to(x.dtype), factor)

    def npu_add_rms_norm(
        self, x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
    ) -> tuple[Tensor, ...]:
        contracts.add_rms_norm(x1, x2, gamma)
        total = (self._host(x1).float() + self._host(x2).float()).to(x1.dtype)
        normed, factor = self._norm(total.float(), gamma, epsilon)
        return self._like(x1, normed.to(x1.dtype), factor, total)

    def npu_swiglu(self, x: Tensor, dim: int = -1) -> Tensor:
        contracts.swiglu(x)
        gate, up = self._host(x).float().chunk(2, dim)
        return self._like(x, (functional.silu(gate) * up).to(x.dtype))[0]

    def npu_rotary_mul(
        self,
        x: Tensor,
        r1: Tensor,
        r2: Tensor,
        rotary_mode: str = "half",
        rotate: Tensor | None = None,
    ) -> Tensor:
        contracts.rotary_mul(x, r1, r2)
        require(rotary_mode == "half", "npu_rotary_mul", f"mode {rotary_mode} is not served here")
        wide = self._host(x).float()
        first, second = wide.chunk(2, -1)
        across = torch.cat([-second, first], -1)
        turned = wide * self._host(r1).float() + across * self._host(r2).float()
        return self._like(x, turned.to(x.dtype))[0]

    def npu_scatter_nd_update_(self, pages: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        name = "npu_scatter_nd_update_"
        contracts.scatter_nd_update(pages, indices, updates)
        depth = indices.shape[-1]
        places = self._host(indices).long().reshape(-1, depth)
        for axis in range(depth if len(places) else 0):
            low, high = int(places[:, axis].min()), int(places[:, axis].max())
            require(
                low >= 0 and high < pages.shape[axis],
                name,
                f"indices must be 0 to {pages.shape[axis] - 1}, they are {low} to {high}: a device "
                "would write into memory of others",
            )
        values = self._host(updates).reshape(-1, *pages.shape[depth:])
        self._core.host_alias(pages, True).index_put_(tuple(places.unbind(1)), values)
        return pages

    def npu_fused_infer_attention_score(
        self, query: Tensor, key: Tensor, value: Tensor, **given: object
    ) -> tuple[Tensor, Tensor]:
        call = _Call(query, key, value, given)
        table = self._host(call.block_table)
        pages = len(key)
        for row, length in enumerate(call.lengths):
            used = table[row, : -(-length // call.block_size)]
            is_inside = not len(used) or (int(used.min()) >= 0 and int(used.max()) < pages)
            require(
                is_inside,
                _FIA,
                f"the pages of row {row} must be 0 to {pages - 1}, they are {used.tolist()}: a "
                "device would read memory of others",
            )
        if call.mask is not None:
            _check_triangle(self._host(call.mask))
        wide, keys, values = self._host(query), _plain(self._host(key)), _plain(self._host(value))
        if call.query_rope is not None and call.key_rope is not None:
            wide = torch.cat([wide, self._host(call.query_rope)], -1)
            keys = torch.cat([keys, _plain(self._host(call.key_rope))], -1)
        sinks = None if call.sinks is None else self._host(call.sinks).float()
        out = torch.empty_like(self._host(query))
        flat = wide.flatten(0, 1) if call.layout == "BSND" else wide  # [tokens, heads, dim]
        flat_out = out.flatten(0, 1) if call.layout == "BSND" else out
        for row, length in enumerate(call.lengths):
            mine = slice(call.ends[row], call.ends[row + 1])
            used = table[row, : -(-length // call.block_size)].long()
            k, v = (
                part[used].flatten(0, 1)[:length].unflatten(1, (call.kv_heads, -1))
                for part in (keys, values)
            )
            seen = _seen(mine.stop - mine.start, length, call)
            flat_out[mine] = _attend(flat[mine], k, v, seen, call.scale, sinks)
        return self._like(query, out, torch.zeros(0))[:2]  # type: ignore[return-value]

    def npu_fused_infer_attention_score_v2(
        self, query: Tensor, key: Tensor, value: Tensor, **given: object
    ) -> tuple[Tensor, Tensor]:
        older = {_OLDER_NAMES.get(name, name): each for name, each in given.items()}
        return self.npu_fused_infer_attention_score(query, key, value, **older)

    def _norm(self, wide: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        return wide * factor * self._host(gamma).float(), factor

    def _like(self, x: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._device(result, x.device.index) for result in results)


class _Call:
    """The arguments of an attention that are used here; the others must be left out."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, given: dict[str, object]) -> None:
        rest = dict(given)

        def take(name: str, default: object = None) -> object:
            return rest.pop(name, default)

        self.layout = str(take("input_layout", "BSH"))
        self.mode = int(take("sparse_mode", 0))  # type: ignore[call-overload]
        self.block_size = int(take("block_size", 0))  # type: ignore[call-overload]
        self.heads = int(take("num_heads", 1))  # type: ignore[call-overload]
        self.kv_heads = int(take("num_key_value_heads", 0)) or self.heads  # type: ignore[call-overload]
        self.scale = float(take("scale", 1.0))  # type: ignore[arg-type]
        self.before = int(take("pre_tokens", _ENDLESS))  # type: ignore[call-overload]
        self.after = int(take("next_tokens", _ENDLESS))  # type: ignore[call-overload]
        self.mask: Tensor | None = take("atten_mask")  # type: ignore[assignment]
        self.block_table: Tensor = take("block_table")  # type: ignore[assignment]
        self.query_rope: Tensor | None = take("query_rope")  # type: ignore[assignment]
        self.key_rope: Tensor | None = take("key_rope")  # type: ignore[assignment]
        self.sinks: Tensor | None = take("learnable_sink")  # type: ignore[assignment]
        ends, lengths = take("actual_seq_lengths"), take("actual_seq_lengths_kv")
        unused = [name for name, value in rest.items() if value not in (None, 0, False)]
        require(not unused, _FIA, f"{', '.join(unused)} are not served here")
        contracts.fused_infer_attention(
            query,
            key,
            value,
            atten_mask=self.mask,
            actual_seq_lengths=ends,  # type: ignore[arg-type]
            actual_seq_lengths_kv=lengths,  # type: ignore[arg-type]
            block_table=self.block_table,
            num_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            input_layout=self.layout,
            sparse_mode=self.mode,
            block_size=self.block_size,
            query_rope=self.query_rope,
            key_rope=self.key_rope,
            learnable_sink=self.sinks,
        )
        self.lengths: list[int] = list(lengths)  # type: ignore[call-overload]
        count = query.shape[1]
        if self.layout == "TND":
            self.ends = [0, *ends]  # type: ignore[misc]
            self.is_single = False
        else:
            self.ends = [row * count for row in range(len(query) + 1)]
            self.is_single = count == 1


def _plain(pages: Tensor) -> Tensor:
    """Fractal pages token by token, as the others are. [pages, page size, kv_heads · dim]"""
    if pages.dim() != contracts.FRACTAL_AXES:
        return pages
    return pages.permute(0, 3, 1, 2, 4).flatten(2)  # [pages, page size, heads, dim / 16, 16]


def _seen(count: int, length: int, call: _Call) -> Tensor:
    """Which keys each query sees: of a single one all, whatever mode and window say."""
    keys = torch.arange(length)
    if call.is_single or call.mode == contracts.ALL:
        return torch.ones(count, length, dtype=torch.bool)
    last = torch.arange(length - count, length).unsqueeze(1)
    seen = keys <= last
    if call.mode == BAND:
        seen = (keys <= last + call.after) & (keys >= last - call.before)
    return seen


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """q: [count, heads, dim]; k, v: [length, kv_heads, dim]; seen: [count, length];
    sinks: [heads]."""
    shared = q.shape[1] // k.shape[1]
    k, v = (part.float().repeat_interleave(shared, 1).transpose(0, 1) for part in (k, v))
    logits = q.float().transpose(0, 1) @ k.transpose(1, 2) * scale  # [heads, count, length]
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(-1, 1, 1).expand(-1, len(seen), 1)], -1)
    weights = logits.softmax(-1).nan_to_num(0)[..., : seen.shape[1]]
    return (weights @ v).transpose(0, 1).to(q.dtype)


def _check_triangle(mask: Tensor) -> None:
    is_triangle = torch.equal(mask.bool(), _triangle())
    require(
        is_triangle,
        _FIA,
        f"the mask of {MASK_SIZE} rows must be 1 above the diagonal only",
    )


@cache
def _triangle() -> Tensor:
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu(1)
