"""Calls of attention that are refused, and the sentence that says why."""

import torch

from tests.ascend.emulation.refused.calls import Given, floats, ints, longs, make

Refusal = tuple[str, Given, str]
"""A call, what is changed about it, and what is said then."""

_NARROW = {"query": make(3, 1, 32, 256)} | {n: make(16, 128, 256) for n in ("key", "value")}
_PAGED = {n: make(16, 256, 512) for n in ("key", "value")} | {"key_rope": make(16, 256, 64)}
_FRACTAL = {n: make(16, 1, 32, 64, 16) for n in ("key", "value")}
_HALVES = {n: make(32, 64, 256) for n in ("key", "value")}
_WIDEST = {n: make(1, 16, 65536) for n in ("key", "value")}

ATTENTION: list[Refusal] = [
    ("attention", {"block_table": None}, "only attention over pages is served here"),
    ("attention", {"query": make(3, 1, 8, 64, dtype=torch.half)}, "must have one dtype, not"),
    ("attention", {"block_table": longs(3, 4)}, "block_table must be torch.int32, it is"),
    ("attention", {"num_key_value_heads": 3}, "1 to 64 times the kv heads, they are 8 and 3"),
    ("attention", {"num_key_value_heads": -1}, "they are 8 and -1"),
    ("attention", {"query": make(3, 1, 512, 64), "num_heads": 512}, "heads must be at most 256"),
    ("attention", {"num_heads": 130}, "1 to 64 times the kv heads, they are 130 and 2"),
    ("attention", {"input_layout": "BNSD"}, "layout BNSD is not served here: BSND or TND"),
    ("attention", {"query": make(3, 8, 64)}, "a BSND query of 8 heads has 4 dimensions"),
    ("attention", {"query": make(3, 1, 4, 64)}, r"it is \[3, 1, 4, 64\]"),
    ("attention", {"query": make(65537, 1, 8, 64)}, "rows must be 1 to 65536, they are 65537"),
    ("attention", {"query": make(0, 1, 8, 64)}, "rows must be 1 to 65536, they are 0"),
    ("attention", {"query": make(3, 1, 8, 24)}, "a multiple of 16 and at most 512 dimensions"),
    ("attention", {"query": make(3, 1, 8, 528)}, "at most 512 dimensions, they have 528"),
    ("attention", {"block_size": 24}, "block_size must be a multiple of 16 and at most 512 here"),
    ("attention", {"block_size": 0}, "at most 512 here, it is 0"),
    ("attention", {"block_size": 528}, "at most 512 here, it is 528"),
    (
        "attention",
        {"query": make(3, 1, 256, 512), "num_heads": 256, "num_key_value_heads": 128}
        | _WIDEST
        | {"block_size": 16},
        "pages are 65536 wide, not up to 65535",
    ),
    ("attention", {"num_key_value_heads": 4}, r"pages must be \[pages, 128, 256\]"),
    ("attention", {"key": make(16, 128, 2, 64)}, r"they are \[16, 128, 2, 64\]"),
    ("attention", {"value": make(15, 128, 128)}, "key and value must have as many pages"),
    ("attention", {"actual_seq_lengths_kv": None}, "over pages needs actual_seq_lengths_kv"),
    ("attention", {"actual_seq_lengths_kv": []}, "over pages needs actual_seq_lengths_kv"),
    ("attention", {"actual_seq_lengths_kv": [1, 2]}, "must be 3 numbers from 0 on, they are"),
    ("attention", {"actual_seq_lengths_kv": [1, 2, -1]}, "from 0 on, they are"),
    ("attention", {"block_table": ints(2, 4)}, r"block_table must be \[3, pages of a row\]"),
    ("attention", {"block_table": ints(12)}, r"block_table must be \[3, pages of a row\]"),
    ("attention", {"block_table": ints(3, 2)}, "must have 3 columns for 257 positions of 128 a"),
    ("attention", {"learnable_sink": make(7)}, r"learnable_sink must be \[8\], it is \[7\]"),
    ("attention", {"learnable_sink": make(8, dtype=torch.half)}, "learnable_sink must be torch.bf"),
    ("attention", {"learnable_sink": torch.ones(8)}, "learnable_sink must lie on the NPU"),
    ("attention of rows", {"sparse_mode": 2}, "sparse_mode 2 is not served here"),
    ("attention of rows", {"sparse_mode": 0}, "masks of other sizes than the triangle are not"),
    ("attention of rows", {"atten_mask": None}, "needs the mask of 2048 x 2048, it is None"),
    ("attention of rows", {"atten_mask": floats(2048, 2048)}, "atten_mask must be torch.bool"),
    ("attention of rows", {"block_size": 64}, "block_size must be a multiple of 128"),
    (
        "attention together",
        {"atten_mask": make(128, 128, dtype=torch.bool)},
        r"needs the mask of 2048 x 2048, it is \(128, 128\)",
    ),
    ("attention together", {"query": make(45, 1, 8, 128)}, "a TND query of 8 heads has 3 dim"),
    ("attention together", {"query": make(45, 8, 64)}, "needs heads of 128 or 192 or 256 dim"),
    ("attention together", {"actual_seq_lengths": None}, "TND needs actual_seq_lengths"),
    ("attention together", {"actual_seq_lengths": []}, "TND needs actual_seq_lengths"),
    ("attention together", {"actual_seq_lengths": [10, 5, 45]}, "are sums, rising to the number"),
    ("attention together", {"actual_seq_lengths": [10, 40, 44]}, "the number of tokens 45; they"),
    ("attention together", _HALVES | {"block_size": 64}, "must be a multiple of 128"),
    ("attention over latents", _NARROW, "latents have 512 dimensions"),
    ("attention over latents", {"query_rope": None}, "come together or not at all"),
    ("attention over latents", {"key_rope": None}, "come together or not at all"),
    (
        "attention over latents",
        {"query": make(3, 1, 4, 512), "num_heads": 4},
        "128 or 32 or 64 heads and 1 kv head; they have 512, 4 and 1",
    ),
    (
        "attention over latents",
        {"num_key_value_heads": 2, "query": make(3, 1, 64, 512), "num_heads": 64}
        | {n: make(16, 128, 1024) for n in ("key", "value")},
        "they have 512, 64 and 2",
    ),
    ("attention over latents", {"query_rope": make(3, 1, 32, 32)}, "query but|and key but 64 wide"),
    ("attention over latents", {"key_rope": make(15, 128, 64)}, r"\[16, 128, 64\] is \[15, 128"),
    (
        "attention over latents",
        {"query_rope": make(3, 1, 32, 64, dtype=torch.half)},
        "query, query_rope, key_rope must have one dtype",
    ),
    ("attention over latents", _PAGED | {"block_size": 256}, "must be 128 or 16, it is 256"),
    ("attention over latents", {"sparse_mode": 3}, "over latents must be 0 here, it is 3"),
    ("attention over latents", {"learnable_sink": make(32)}, "there are no sinks over latents"),
    (
        "attention over latents together",
        {"query": make(46, 32, 512), "query_rope": make(46, 32, 64)}
        | {"actual_seq_lengths": [17, 30, 46]},
        "rows over latents have at most 16 tokens, one has 17",
    ),
    ("attention over latents together", {"sparse_mode": 4}, "must be 3 here, it is 4"),
    (
        "attention over latents together",
        {n: make(16, 128, 256) for n in ("key", "value")} | {"query": make(45, 32, 256)},
        "TND over pages needs heads of 512 dimensions, they have 256",
    ),
    ("attention over fractal pages", {"block_size": 64, **_FRACTAL}, "must be 128, it is 64"),
    (
        "attention over fractal pages",
        {n: make(16, 1, 16, 128, 16) for n in ("key", "value")},
        r"pages must be \[pages, 1, 32, 128, 16\]",
    ),
    (
        "attention over fractal pages",
        {"key_rope": make(16, 4, 128, 16)},
        r"\[16, 1, 4, 128, 16\] is \[16, 4, 128, 16\]",
    ),
    ("choose_positions", {"query": make(6, 8, 64)}, r"query must be \[tokens, heads up to 64, 128"),
    (
        "choose_positions",
        {"query": make(6, 65, 128), "weights": make(6, 65)},
        r"heads up to 64, 128\], it is \[6, 65, 128\]",
    ),
    ("choose_positions", {"weights": make(6, 7)}, r"weights must be \[6, 8\], they are \[6, 7\]"),
    ("choose_positions", {"weights": make(6, 8, dtype=torch.half)}, "must have one dtype"),
    (
        "choose_positions",
        {"key": make(16, 64, 1, 128)},
        r"pages must be \[pages, 16 or 128, 1, 128",
    ),
    ("choose_positions", {"key": make(16, 128, 128)}, r"they are \[16, 128, 128\]"),
    ("choose_positions", {"block_table": longs(3, 4)}, "must be torch.int32"),
    ("choose_positions", {"block_table": ints(12)}, r"must be \[0\] as block_table has rows"),
    ("choose_positions", {"actual_seq_lengths_key": ints(2)}, r"must be \[3\] as block_table has"),
    ("choose_positions", {"actual_seq_lengths_query": ints(3, 1)}, r"it is \[3, 1\]"),
    ("choose_positions", {"top": 2049}, "1 to 2048 or 3072, 4096 … 8192, it is 2049"),
    ("choose_positions", {"top": 0}, "it is 0"),
    ("choose_positions", {"top": 9216}, "it is 9216"),
    ("attend_chosen", {"query": make(6, 12, 512)}, "a power of two up to 128, 512"),
    ("attend_chosen", {"query": make(6, 256, 512)}, r"it is \[6, 256, 512\]"),
    ("attend_chosen", {"query": make(6, 16, 256)}, r"it is \[6, 16, 256\]"),
    ("attend_chosen", {"query": make(96, 512)}, r"it is \[96, 512\]"),
    ("attend_chosen", {"query_rope": make(6, 16, 32)}, r"query_rope must be \[6, 16, 64\]"),
    ("attend_chosen", {"key_rope": make(16, 128, 1, 32)}, r"\[pages, 16 or 128, 1, 64\]"),
    ("attend_chosen", {"key": make(16, 64, 1, 512)}, r"\[pages, 16 or 128, 1, 512\]"),
    ("attend_chosen", {"actual_seq_lengths_key": ints(2)}, r"must be \[3\] as block_table has"),
    ("attend_chosen", {"sparse_indices": ints(6, 16)}, r"must be \[6, 1, positions\]"),
    ("attend_chosen", {"sparse_indices": ints(5, 1, 16)}, r"must be \[6, 1, positions\]"),
    ("attend_chosen", {"sparse_indices": ints(6, 1, 2049)}, r"they are \[6, 1, 2049\]"),
]
