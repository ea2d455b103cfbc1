"""Flags of the KV cache: its size, its pages and what is kept."""

from banyan.config.flags.flag import FLOAT, INT, SWITCH, Flag

FLAGS = (
    Flag("page-size", "cache.page_size", "tokens per cache page", kind=INT, low=1, high=1024),
    Flag(
        "kv-cache-dtype",
        "cache.dtype",
        "number type of cached keys and values; auto = fp16 beside kernels that round activations",
        choices=("auto", "fp32", "fp16", "bf16"),
        translate=(("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")),
    ),
    Flag(
        "max-total-tokens",
        "cache.max_total_tokens",
        "tokens the cache holds; default: from free memory",
        kind=INT,
        low=1,
    ),
    Flag(
        "mem-fraction-static",
        "cache.memory_fraction",
        "share of memory for weights and cache; default: decided from what is free",
        kind=FLOAT,
        low=0.01,
        high=0.99,
    ),
    Flag(
        "disable-radix-cache",
        "cache.disable_radix",
        "share no prefixes between requests",
        kind=SWITCH,
    ),
    Flag(
        "radix-eviction-policy",
        "cache.eviction",
        "which cached prefix goes first when room is needed",
        choices=("lru", "lfu", "fifo"),
    ),
)
