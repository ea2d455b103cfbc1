"""Calls that the operators take, and what each is given: refused ones are changes of them.

Tensors are of torch's device without memory, so that limits of any size can be passed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from banyan.ascend.ops import contracts, product_contracts
from banyan.ascend.ops.contracts import exchanged
from banyan.ascend.ops.latent_contracts import WHOLLY, PrologWeights
from banyan.ascend.ops.operators import Fuser, Operators, Sent
from banyan.ascend.ops.product_contracts import A3, FUSED
from banyan.ops.experts_api import Ranks

HALF = torch.bfloat16
RANKS = Ranks("experts", 0, 2)
EXPERTS = 4

Given = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """
    Attributes:
        run: holds what is given against the contract, through the caller of the operator.
        given: what is taken; tensors by the names that the operator has for them.
    """

    run: Callable[[Operators, Given], object]
    given: Given


class Echo:
    """Stands for a library whose operators are never reached: takes any call."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **named: [None] * (3 if name == "npu_add_rms_norm" else 7)

    def Buffer(self, *args: object, **named: object) -> SimpleNamespace:
        return SimpleNamespace(fused_deep_moe=lambda *args, **named: [None])


def make(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return make(*shape, dtype=torch.int32)


def longs(*shape: int) -> Tensor:
    return make(*shape, dtype=torch.int64)


def floats(*shape: int) -> Tensor:
    return make(*shape, dtype=torch.float32)


def bytes_of(*shape: int) -> Tensor:
    return make(*shape, dtype=torch.int8)


def by_name(method: str, *names: str) -> Callable[[Operators, Given], object]:
    """Calls a method of `Operators` or of one of its parts with these arguments, in their order."""
    found = attrgetter(method)
    return lambda operators, given: found(operators)(*(given[name] for name in names))


def attention(operators: Operators, given: Given) -> None:
    """Each argument by itself: `Operators` gives only some of their combinations."""
    contracts.fused_infer_attention(**given)


def _single(operators: Operators, given: Given) -> None:
    parts = (given[name] for name in ("query", "key", "value", "block_table"))
    operators.attention.attend_single(*parts, [130, 257, 5], 2, 0.1, given["learnable_sink"])


def _rows(operators: Operators, given: Given) -> None:
    parts = (given[name] for name in ("query", "key", "value", "block_table"))
    operators.attention.attend_rows(*parts, [130, 257, 5], 2, 0.1, 0)


def _together(operators: Operators, given: Given) -> None:
    parts = (given[name] for name in ("query", "key", "value", "block_table"))
    operators.attention.attend_together(*parts, [10, 40, 45], [130, 257, 5], 2, 0.1, 20)


def _latents(operators: Operators, given: Given) -> None:
    names = ("query", "query_rope", "key", "key_rope", "block_table")
    operators.attention.attend_latents(*(given[name] for name in names), None, [130, 257, 25], 0.1)


def _combine(operators: Operators, given: Given) -> None:
    parts = ("expand_x", "assist_info_for_combine", "ep_send_counts")
    rows, places, received = (given[name] for name in parts)
    sent = Sent(rows, None, ints(2), places, received)
    rest = (given["ranks"], given["experts"], A3)
    operators.experts.combine(rows, sent, given["expert_ids"], given["expert_scales"], *rest)


def _dispatch(operators: Operators, given: Given) -> None:
    names = ("x", "expert_ids", "expert_scales", "ranks", "experts")
    operators.experts.dispatch(*(given[name] for name in names), A3)


def _prolog(operators: Operators, given: Given) -> None:
    names = ("weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr")
    scales = tuple(
        given[f"dequant_scale of {name}"] for name in ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
    )
    weights = PrologWeights(given["mode"], *(given[name] for name in names), scales)
    operators.latents.mla_prolog(
        *(given["token_x"], given["dequant_scale_x"], weights),
        *((given["gamma_cq"], given["gamma_ckv"]), (given["rope_sin"], given["rope_cos"])),
        *((given["kv_cache"], given["kr_cache"]), given["cache_index"], (1e-6, 1e-6)),
        mode=given["cache_mode"],
    )


def _scatter_pages(operators: Operators, given: Given) -> None:
    pages = (given["key_cache"], given["value_cache"])
    operators.latents.scatter_pages(given["key"], given["value"], pages, given["slot_mapping"])


def _fused(operators: Operators, given: Given) -> None:
    first, second = "gmm1_permuted_weight", "gmm2_weight"
    weights = ((given[name], given[f"{name}_scale"]) for name in (first, second))
    mode = given["mode"]
    fuse = Fuser(Echo(), mode, FUSED[0 if mode == 1 else 1], is_checked=True)
    rows = (given["x"], given["topk_idx"], given["topk_weights"])
    fuse(*rows, *weights, given["ranks"], given["experts"])


def _four_bits(method: str, *names: str) -> Callable[[Operators, Given], object]:
    def run(operators: Operators, given: Given) -> None:
        getattr(operators.four_bits, method)(*(given[name] for name in names))

    return run


def _collective(operators: Operators, given: Given) -> None:
    exchanged("broadcast", given["tensor 0"], given["tensor 1"])


_PAGES = {"key": make(16, 128, 128), "value": make(16, 128, 128), "block_table": ints(3, 4)}
_LENGTHS = {"actual_seq_lengths": None, "actual_seq_lengths_kv": [130, 257, 5]}
_SHAPES = {"num_heads": 8, "num_key_value_heads": 2, "block_size": 128}
_WIDE = {name: make(16, 128, 256) for name in ("key", "value")}
_MASK = {"atten_mask": make(2048, 2048, dtype=torch.bool)}
_OF_ROWS = {"key": make(16, 128, 1, 128), "block_table": ints(3, 4)}
_ENDS = {"actual_seq_lengths_query": ints(3), "actual_seq_lengths_key": ints(3)}
_BOTH = {"num_heads": 32, "num_key_value_heads": 1}
_OF_LATENTS = {
    **{"query": make(3, 1, 32, 512), "query_rope": make(3, 1, 32, 64)},
    **{"key": make(16, 128, 512), "value": make(16, 128, 512), "key_rope": make(16, 128, 64)},
    "block_table": ints(3, 4),
}
_FUSED = {
    **{"x": make(3, 512), "topk_idx": longs(3, 2), "topk_weights": floats(3, 2)},
    **{"gmm1_permuted_weight": bytes_of(2, 512, 1024), "gmm2_weight": bytes_of(2, 512, 512)},
    **{"gmm1_permuted_weight_scale": floats(2, 1024), "gmm2_weight_scale": floats(2, 512)},
    **{"ranks": RANKS, "experts": EXPERTS, "mode": 1},
}

CALLS: dict[str, Call] = {
    "rms_norm": Call(
        lambda o, g: o.rms_norm(g["x"], g["gamma"], 1e-6), {"x": make(5, 32), "gamma": make(32)}
    ),
    "add_rms_norm": Call(
        lambda o, g: o.add_rms_norm(g["x1"], g["x2"], g["gamma"], 1e-6),
        {"x1": make(5, 32), "x2": make(5, 32), "gamma": make(32)},
    ),
    "swiglu": Call(by_name("swiglu", "x"), {"x": make(5, 32)}),
    "rotary_mul": Call(
        by_name("rotary_mul", "x", "r1", "r2"),
        {"x": make(1, 5, 4, 16), "r1": make(1, 5, 1, 16), "r2": make(1, 5, 1, 16)},
    ),
    "scatter": Call(
        by_name("scatter", "self", "indices", "updates"),
        {"self": make(6, 4), "indices": longs(2, 1), "updates": make(2, 4)},
    ),
    "attention": Call(
        attention,
        {"query": make(3, 1, 8, 64), **_PAGES, **_LENGTHS, **_SHAPES}
        | {"atten_mask": None, "input_layout": "BSND", "sparse_mode": 0},
    ),
    "attention of rows": Call(
        attention,
        {"query": make(3, 7, 8, 64), **_PAGES, **_LENGTHS, **_SHAPES, **_MASK}
        | {"input_layout": "BSND", "sparse_mode": 3},
    ),
    "attention together": Call(
        attention,
        {"query": make(45, 8, 128), **_PAGES, **_WIDE, **_LENGTHS, **_SHAPES, **_MASK}
        | {"input_layout": "TND", "sparse_mode": 3, "actual_seq_lengths": [10, 40, 45]},
    ),
    "attention over latents": Call(
        attention,
        {**_OF_LATENTS, **_LENGTHS, **_SHAPES, **_BOTH}
        | {"atten_mask": None, "input_layout": "BSND", "sparse_mode": 0},
    ),
    "attention over latents together": Call(
        attention,
        {**_OF_LATENTS, **_LENGTHS, **_SHAPES, **_BOTH, **_MASK}
        | {"query": make(45, 32, 512), "query_rope": make(45, 32, 64), "input_layout": "TND"}
        | {"sparse_mode": 3, "actual_seq_lengths": [15, 30, 45]},
    ),
    "attention over fractal pages": Call(
        attention,
        {**_OF_LATENTS, **_LENGTHS, **_SHAPES, **_BOTH}
        | {"atten_mask": None, "input_layout": "BSND", "sparse_mode": 0}
        | {name: make(16, 1, 32, 128, 16) for name in ("key", "value")}
        | {"key_rope": make(16, 1, 4, 128, 16)},
    ),
    "attend_single": Call(
        _single, {"query": make(3, 1, 8, 64), **_PAGES, "learnable_sink": make(8)}
    ),
    "attend_rows": Call(_rows, {"query": make(3, 7, 8, 64), **_PAGES}),
    "attend_together": Call(_together, {"query": make(45, 8, 128), **_PAGES, **_WIDE}),
    "attend_latents": Call(
        _latents, {name: part for name, part in _OF_LATENTS.items() if name != "value"}
    ),
    "choose_positions": Call(
        by_name(
            "attention.choose_positions", "query", "key", "weights", "block_table", *_ENDS, "top"
        ),
        {"query": make(6, 8, 128), "weights": make(6, 8), "top": 16, **_OF_ROWS, **_ENDS},
    ),
    "attend_chosen": Call(
        lambda o, g: o.attention.attend_chosen(
            *(g[name] for name in ("query", "query_rope", "key", "key_rope", "sparse_indices")),
            *(g[name] for name in ("block_table", *_ENDS)),
            0.1,
        ),
        {"query": make(6, 16, 512), "query_rope": make(6, 16, 64), **_OF_ROWS, **_ENDS}
        | {"key": make(16, 128, 1, 512), "key_rope": make(16, 128, 1, 64)}
        | {"sparse_indices": ints(6, 1, 16)},
    ),
    "init_routing": Call(
        by_name("experts.init_routing", "x", "expert_idx", "first", "last", "experts"),
        {"x": make(3, 8), "expert_idx": ints(3, 2), "first": 0, "last": 4, "experts": EXPERTS},
    ),
    "dispatch": Call(
        _dispatch,
        {"x": make(3, 1024), "expert_ids": ints(3, 2), "expert_scales": floats(3, 2)}
        | {"ranks": RANKS, "experts": EXPERTS},
    ),
    "combine": Call(
        _combine,
        {"expand_x": make(12, 1024), "expert_ids": ints(3, 2), "expert_scales": floats(3, 2)}
        | {"assist_info_for_combine": ints(1536), "ep_send_counts": ints(4)}
        | {"ranks": RANKS, "experts": EXPERTS},
    ),
    "grouped_matmul": Call(
        by_name("experts.grouped_matmul", "x", "weight", "group_list"),
        {"x": make(3, 8), "weight": make(2, 8, 4), "group_list": longs(2)},
    ),
    "grouped_quant_matmul": Call(
        by_name(
            "experts.grouped_quant_matmul",
            "x",
            "weight",
            "group_list",
            "scale",
            "per_token_scale",
            "dtype",
        ),
        {"x": bytes_of(3, 32), "weight": bytes_of(2, 32, 64), "group_list": longs(2)}
        | {"scale": make(2, 64), "per_token_scale": floats(3), "dtype": HALF},
    ),
    "token_unpermute": Call(
        by_name("experts.token_unpermute", "permuted_tokens", "sorted_indices", "probs"),
        {"permuted_tokens": make(4, 8), "sorted_indices": ints(4), "probs": make(2, 2)},
    ),
    "dynamic_quant": Call(by_name("dynamic_quant", "input"), {"input": make(2, 64)}),
    "quantize": Call(
        by_name("quantize", "input", "scales", "zero_points"),
        {"input": make(2, 64), "scales": make(64), "zero_points": make(64)},
    ),
    "cast_fractal": Call(by_name("cast_fractal", "input"), {"input": bytes_of(64, 32)}),
    "format_cast": Call(  # the caller leaves out what has other sizes
        lambda _, given: product_contracts.format_cast(given["input"]), {"input": make(32, 16)}
    ),
    "quant_matmul": Call(
        by_name("quant_matmul", "x1", "x2", "scale", "dtype", "pertoken_scale", "bias"),
        {"x1": bytes_of(3, 64), "x2": bytes_of(64, 32), "scale": floats(32), "dtype": HALF}
        | {"pertoken_scale": floats(3), "bias": ints(32)},
    ),
    "matmul by 4 bits": Call(
        _four_bits("matmul", "x1", "x2", "scale", "pertoken_scale", "offset", "dtype"),
        {"x1": bytes_of(5, 512), "x2": ints(512, 6), "scale": longs(2, 48), "dtype": HALF}
        | {"pertoken_scale": floats(5, 1), "offset": floats(48)},
    ),
    "grouped_matmul by 4 bits": Call(
        _four_bits(
            *("grouped_matmul", "x", "weight", "group_list", "scale", "per_token_scale", "bias"),
            "dtype",
        ),
        {"x": bytes_of(5, 512), "weight": ints(2, 512, 6), "scale": longs(2, 2, 48), "dtype": HALF}
        | {"group_list": longs(2), "per_token_scale": floats(5), "bias": floats(2, 48)},
    ),
    "mla_prolog": Call(
        _prolog,
        {"token_x": bytes_of(5, 6144), "weight_dq": bytes_of(6144, 1536), "mode": WHOLLY}
        | {"weight_uq_qr": bytes_of(1536, 384), "weight_uk": make(2, 128, 512)}
        | {"weight_dkv_kr": bytes_of(6144, 576), "gamma_cq": make(1536), "gamma_ckv": make(512)}
        | {"rope_sin": make(5, 64), "rope_cos": make(5, 64), "cache_index": longs(5)}
        | {"kv_cache": make(3, 128, 1, 512), "kr_cache": make(3, 128, 1, 64)}
        | {"dequant_scale_x": floats(5, 1), "dequant_scale of weight_dq": floats(1, 1536)}
        | {"dequant_scale of weight_uq_qr": floats(1, 384), "cache_mode": "PA_BSND"}
        | {"dequant_scale of weight_dkv_kr": floats(1, 576)},
    ),
    "scatter_pages": Call(
        _scatter_pages,
        {"key": make(3, 1, 512), "value": make(3, 1, 64), "slot_mapping": longs(3)}
        | {"key_cache": make(2, 32, 128, 16), "value_cache": make(2, 4, 128, 16)},
    ),
    "fused_deep_moe": Call(_fused, _FUSED),
    "fused_deep_moe, the second": Call(
        _fused,
        _FUSED
        | {"gmm1_permuted_weight_scale": longs(2, 1024), "gmm2_weight_scale": longs(2, 512)}
        | {"mode": 2},
    ),
    "collective": Call(_collective, {"tensor 0": floats(4, 3), "tensor 1": floats(4, 3)}),
}
