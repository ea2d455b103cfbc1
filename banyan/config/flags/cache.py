"""Flags of the KV cache: its size, its pages and what is kept."""

from banyan.config.flags.flag import FLOAT, INT, JSON, SWITCH, Elsewhere, Flag

FLAGS = (
    Flag(
        "page-size",
        "cache.page_size",
        "tokens per cache page; default: what suits the device, 16 on a CPU, where 16, 32, 64, 128 "
        "and 256 have fast kernels",
        kind=INT,
        low=1,
        high=1024,
        proof="tests/system/test_flag_effects.py::test_smaller_pages_are_more_and_a_prefix_is_shared_to_the_token_in_all",
    ),
    Flag(
        "kv-cache-dtype",
        "cache.dtype",
        "number type of cached keys and values; auto = fp16 beside kernels that round activations; "
        "int8 keeps a scale per token and head, fp8 takes those of --quantization-param-path, or 1",
        choices=("auto", "fp32", "fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2"),
        translate=(("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")),
        elsewhere=(
            Elsewhere(
                "mxfp8 nvfp4 fp4_mx_block16 fp4_e2m1",
                "no kernel here reads cached floats of 4 bits, or in blocks with scales",
                "fp8_e4m3 and fp8_e5m2 take 8 bits a number, int8 also a scale per head",
            ),
        ),
        proof="tests/system/test_flag_effects.py::test_half_precision_halves_the_cache",
    ),
    Flag(
        "quantization-param-path",
        "cache.scales",
        "JSON file with the scales of cached keys and values, by rank and layer, for "
        "--kv-cache-dtype fp8_e4m3 or fp8_e5m2; default: all are 1",
        proof="tests/system/test_flag_effects.py"
        "::test_keys_and_values_of_8_bits_are_kept_in_units_of_the_scales_of_a_file",
    ),
    Flag(
        "max-total-tokens",
        "cache.max_total_tokens",
        "tokens the cache holds; default: from free memory",
        kind=INT,
        low=1,
        proof="tests/system/test_flag_effects.py"
        "::test_the_cache_holds_as_many_tokens_as_it_is_told",
    ),
    Flag(
        "mem-fraction-static",
        "cache.memory_fraction",
        "share of memory for weights and cache; default: decided from what is free",
        kind=FLOAT,
        low=0.01,
        high=0.99,
        proof="tests/kv_cache/test_sizing.py"
        "::test_a_share_of_memory_decides_what_weights_and_cache_may_take",
    ),
    Flag(
        "disable-radix-cache",
        "cache.disable_radix",
        "share no prefixes between requests",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py::test_without_the_radix_cache_no_prefix_is_reused",
    ),
    Flag(
        "radix-eviction-policy",
        "cache.eviction",
        "which cached prefix goes first when room is needed (docs/cache.md)",
        choices=("lru", "lfu", "slru", "tlru", "priority", "fifo", "filo", "mru"),
        proof="tests/scheduler/test_evictions.py"
        "::test_the_eviction_policy_decides_what_stays_in_the_cache",
    ),
    Flag(
        "radix-eviction-policy-config",
        "cache.eviction_numbers",
        "JSON object: numbers of the policy; slru takes protected_threshold, tlru threshold and "
        "next_prompt_estimate",
        kind=JSON,
        documented=False,
        proof="tests/scheduler/test_evictions.py"
        "::test_the_numbers_of_a_policy_decide_what_stays_in_the_cache",
    ),
    Flag(
        "swa-full-tokens-ratio",
        "cache.window_ratio",
        "tokens that layers with a window hold, per token of the others; default: what all running "
        "requests need, and a quarter beyond",
        kind=FLOAT,
        low=0.001,
        high=1.0,
        proof="tests/kv_cache/test_sizing.py::test_a_ratio_decides_what_window_layers_hold",
    ),
    Flag(
        "hybrid-kvcache-ratio",
        "cache.window_mix",
        "the same as a mix: 0 = layers with a window hold as many tokens as the others, 1 = the "
        "window's share of the context, -1 = no mix",
        kind=FLOAT,
        low=-1.0,
        high=1.0,
        proof="tests/kv_cache/test_sizing.py"
        "::test_a_mix_lies_between_equal_groups_and_the_window_s_share_of_the_context",
    ),
    Flag(
        "disable-hybrid-swa-memory",
        "cache.keeps_windows",
        "layers with a window keep every position, so that longer prefixes can be reused",
        kind=SWITCH,
        proof="tests/kv_cache/test_sizing.py::test_window_layers_keep_every_position_when_told_so",
    ),
    Flag(
        "max-mamba-cache-size",
        "cache.states",
        "states that layers which keep one hold in all, of running requests and of checkpoints; "
        "default: by --mamba-full-memory-ratio",
        kind=INT,
        low=1,
        proof="tests/kv_cache/test_state_sizing.py::test_as_many_states_are_held_as_told",
    ),
    Flag(
        "mamba-full-memory-ratio",
        "cache.state_ratio",
        "memory of states per memory of keys and values",
        kind=FLOAT,
        low=0.001,
        high=1000.0,
        proof="tests/kv_cache/test_state_sizing.py::test_a_ratio_decides_what_states_take",
    ),
    Flag(
        "mamba-track-interval",
        "cache.state_interval",
        "tokens between two checkpoints of a state, a multiple of the page: such models share "
        "prefixes in pieces of so many; default: 256",
        kind=INT,
        low=1,
        high=65536,
        proof="tests/kv_cache/test_state_sizing.py"
        "::test_the_interval_decides_where_a_prefix_can_be_taken_up",
    ),
    Flag(
        "enable-hierarchical-cache",
        "cache.hierarchical",
        "pages of the cache may lie in further tiers; with --hicache-storage-backend they outlive "
        "the process",
        kind=SWITCH,
        aliases=("enable-hicache",),
        proof="tests/system/test_store.py::test_a_restarted_server_answers_from_the_store",
    ),
    Flag(
        "hicache-ratio",
        "cache.host_ratio",
        "memory of the host for pages per memory that they have on the device, where the cache "
        "lies on one (NPU)",
        kind=FLOAT,
        low=0.0,
        proof="tests/ascend/emulation/test_tiers.py::test_the_ratio_and_the_size_say_how_much_is_kept",
    ),
    Flag(
        "hicache-size",
        "cache.host_gb",
        "the same in GB; wins over the ratio",
        kind=INT,
        low=0,
        proof="tests/ascend/emulation/test_tiers.py::test_the_ratio_and_the_size_say_how_much_is_kept",
    ),
    Flag(
        "hicache-io-backend",
        "cache.host_copies",
        "how pages are copied between a device and the host: kernel_ascend (NPU), kernel (CUDA) = "
        "gathered there, in one piece; direct = each tensor by itself; default: the former",
        choices=("kernel_ascend", "direct", "kernel"),
        proof="tests/ascend/emulation/test_tiers.py::test_pages_are_copied_in_the_way_that_is_asked_for",
    ),
    Flag(
        "hicache-mem-layout",
        "cache.host_layout",
        "how the parts of a page lie in memory of the host: page_first_direct = layer by layer; "
        "page_first_kv_split (NPU), page_first (CUDA) = first the keys of all layers; the others "
        "exist nowhere; default: the second for latent attention, else page_first_direct",
        choices=(
            *("page_first_direct", "page_first_kv_split"),
            *("layer_first", "page_first", "page_head"),
        ),
        proof="tests/ascend/emulation/test_tiers.py::test_the_layout_says_how_the_parts_of_a_page_lie",
    ),
    Flag(
        "hicache-storage-backend",
        "cache.store",
        "where pages are kept beyond the process: file = a folder, which servers may share; nixl = "
        "the same by NIXL; mooncake = memory of a Mooncake cluster; or the name of an installed "
        "store",
        elsewhere=(
            Elsewhere(
                "sim npu_memcache hf3fs aibrix dynamic eic simm mori shm tensorcast seaweedfs",
                "it has no such store",
                "use file, on a folder that all machines reach",
            ),
        ),
        proof="tests/system/test_store.py::test_a_restarted_server_answers_from_the_store",
    ),
    Flag(
        "hicache-storage-backend-extra-config",
        "cache.store_options",
        "of the file store: path, max_bytes, fsync; of every store: prefetch_threshold in tokens, "
        "prefetch_timeout_base and prefetch_timeout_per_ki_token in seconds",
        kind=JSON,
        proof="tests/system/test_store.py::test_a_restarted_server_answers_from_the_store",
    ),
    Flag(
        "hicache-write-policy",
        "cache.store_writes",
        "when pages are stored: write_through = once they are computed, write_through_selective = "
        "when a second request uses them, write_back = when they are evicted",
        choices=("write_through", "write_through_selective", "write_back"),
        proof="tests/system/test_store.py::test_the_write_policy_decides_what_is_stored",
    ),
    Flag(
        "hicache-storage-prefetch-policy",
        "cache.store_waits",
        "how long a request waits for stored pages: best_effort = not at all, wait_complete = "
        "until they have come, timeout = the same within a bound",
        choices=("best_effort", "wait_complete", "timeout"),
        proof="tests/system/test_store.py::test_the_prefetch_policy_decides_who_waits",
    ),
)
