"""KV cache flags: size, pages, eviction, further tiers, and prefill/decode disaggregation."""

from banyan.config.flags.flag import COMMAS, FLOAT, INT, JSON, SWITCH, Elsewhere, Flag

_PAIR_TEST = "tests/system/test_handoff.py::test_a_pair_answers_like_one_server"
FLAGS = (
    Flag(
        "page-size",
        "cache.page_size",
        "tokens per KV cache page; default: the device's own, 16 on a CPU (16 to 256 in powers of "
        "two have fast kernels)",
        kind=INT,
        low=1,
        high=1024,
        proof="tests/system/test_flag_effects.py::test_smaller_pages_are_more_and_a_prefix_is_shared_to_the_token_in_all",
    ),
    Flag(
        "kv-cache-dtype",
        "cache.dtype",
        "data type of the KV cache; auto = the model's, or fp16 when kernels quantize activations; "
        "int8 stores a scale per token and head; fp8 uses the scales of --quantization-param-path, "
        "or 1",
        choices=("auto", "fp32", "fp16", "bf16", "int8", "fp8_e4m3", "fp8_e5m2"),
        translate=(("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")),
        elsewhere=(
            Elsewhere(
                "mxfp8 nvfp4 fp4_mx_block16 fp4_e2m1",
                "no kernel reads 4-bit or block-scaled KV caches",
                "use fp8_e4m3, fp8_e5m2 or int8: 8 bits per value",
            ),
        ),
        proof="tests/system/test_flag_effects.py::test_half_precision_halves_the_cache",
    ),
    Flag(
        "quantization-param-path",
        "cache.scales",
        "JSON file of KV cache scales by rank and layer, for --kv-cache-dtype fp8_e4m3 or "
        "fp8_e5m2; default: all scales are 1",
        proof="tests/system/test_flag_effects.py"
        "::test_keys_and_values_of_8_bits_are_kept_in_units_of_the_scales_of_a_file",
    ),
    Flag(
        "max-total-tokens",
        "cache.max_total_tokens",
        "KV cache size in tokens; default: from free memory",
        kind=INT,
        low=1,
        proof="tests/system/test_flag_effects.py"
        "::test_the_cache_holds_as_many_tokens_as_the_flag_says",
    ),
    Flag(
        "mem-fraction-static",
        "cache.memory_fraction",
        "fraction of memory for weights and KV cache; default: from free memory",
        kind=FLOAT,
        low=0.01,
        high=0.99,
        proof="tests/kv_cache/test_sizing.py"
        "::test_a_share_of_memory_decides_what_weights_and_cache_may_take",
    ),
    Flag(
        "disable-radix-cache",
        "cache.disable_radix",
        "turn off prefix caching",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py::test_without_the_radix_cache_no_prefix_is_reused",
    ),
    Flag(
        "radix-eviction-policy",
        "cache.eviction",
        "eviction policy of the radix cache (docs/cache.md)",
        choices=("lru", "lfu", "slru", "tlru", "priority", "fifo", "filo", "mru"),
        proof="tests/scheduler/test_evictions.py"
        "::test_the_eviction_policy_decides_what_stays_in_the_cache",
    ),
    Flag(
        "radix-eviction-policy-config",
        "cache.eviction_numbers",
        "JSON parameters of the eviction policy: slru takes protected_threshold, tlru takes "
        "threshold and next_prompt_estimate",
        kind=JSON,
        documented=False,
        proof="tests/scheduler/test_evictions.py"
        "::test_the_numbers_of_a_policy_decide_what_stays_in_the_cache",
    ),
    Flag(
        "swa-full-tokens-ratio",
        "cache.window_ratio",
        "KV cache tokens of sliding-window layers per token of full layers; default: peak need of "
        "all running requests plus 25 %",
        kind=FLOAT,
        low=0.001,
        high=1.0,
        proof="tests/kv_cache/test_sizing.py::test_a_ratio_decides_what_window_layers_hold",
    ),
    Flag(
        "hybrid-kvcache-ratio",
        "cache.window_mix",
        "alternative to --swa-full-tokens-ratio: 0 = sliding-window layers get as many tokens as "
        "full layers, 1 = only what the window needs, -1 = off",
        kind=FLOAT,
        low=-1.0,
        high=1.0,
        proof="tests/kv_cache/test_sizing.py"
        "::test_a_mix_lies_between_equal_groups_and_the_window_s_share_of_the_context",
    ),
    Flag(
        "disable-hybrid-swa-memory",
        "cache.keeps_windows",
        "keep KV of every position in sliding-window layers, so that longer prefixes can be reused",
        kind=SWITCH,
        proof="tests/kv_cache/test_sizing.py::test_window_layers_keep_every_position_when_a_flag_asks_for_it",
    ),
    Flag(
        "max-mamba-cache-size",
        "cache.states",
        "number of state slots for linear-attention and Mamba layers, running requests and "
        "checkpoints together; default: by --mamba-full-memory-ratio",
        kind=INT,
        low=1,
        proof="tests/kv_cache/test_state_sizing.py::test_as_many_states_are_held_as_the_flag_says",
    ),
    Flag(
        "mamba-full-memory-ratio",
        "cache.state_ratio",
        "memory of states relative to memory of the KV cache",
        kind=FLOAT,
        low=0.001,
        high=1000.0,
        proof="tests/kv_cache/test_state_sizing.py::test_a_ratio_decides_what_states_take",
    ),
    Flag(
        "mamba-track-interval",
        "cache.state_interval",
        "tokens between two state checkpoints, a multiple of the page size; prefixes are shared at "
        "these points; default: 256",
        kind=INT,
        low=1,
        high=65536,
        proof="tests/kv_cache/test_state_sizing.py"
        "::test_the_interval_decides_where_a_prefix_can_be_taken_up",
    ),
    Flag(
        "mamba-ssm-dtype",
        "cache.state_dtype",
        "data type of states between steps; bfloat16 halves their memory, and answers then depend "
        "a little on how a prompt is chunked",
        choices=("float32", "bfloat16"),
        elsewhere=(
            Elsewhere(
                "float16",
                "states outgrow its range",
                "use bfloat16, which takes as little",
            ),
        ),
        proof="tests/system/test_states.py::test_states_of_half_the_size_answer_nearly_alike",
    ),
    Flag(
        "mamba-scheduler-strategy",
        "cache.state_strategy",
        "no_buffer = one state for each running request, so prefixes are shared while some "
        "are spare; auto, extra_buffer = more states for checkpoints",
        aliases=("mamba-radix-cache-strategy",),
        choices=("auto", "no_buffer", "extra_buffer"),
        elsewhere=(
            Elsewhere(
                "extra_buffer_lazy",
                "states for checkpoints are allocated at the start",
                "use extra_buffer",
            ),
        ),
        proof="tests/kv_cache/test_state_sizing.py"
        "::test_no_states_are_held_for_checkpoints_where_none_are_wanted",
    ),
    Flag(
        "enable-hierarchical-cache",
        "cache.hierarchical",
        "keep evicted KV cache pages in host memory; --hicache-storage-backend adds storage that "
        "outlives the process",
        kind=SWITCH,
        aliases=("enable-hicache",),
        proof="tests/system/test_store.py::test_a_restarted_server_answers_from_the_store",
    ),
    Flag(
        "hicache-ratio",
        "cache.host_ratio",
        "size of the host KV cache relative to the device KV cache (CUDA and NPU)",
        kind=FLOAT,
        low=0.0,
        proof="tests/ascend/emulation/test_tiers.py::test_the_ratio_and_the_size_say_how_much_is_kept",
    ),
    Flag(
        "hicache-size",
        "cache.host_gb",
        "size of the host KV cache in GB; overrides --hicache-ratio",
        kind=INT,
        low=0,
        proof="tests/ascend/emulation/test_tiers.py::test_the_ratio_and_the_size_say_how_much_is_kept",
    ),
    Flag(
        "hicache-io-backend",
        "cache.host_copies",
        "how pages are copied between device and host: kernel (CUDA) and kernel_ascend (NPU) = "
        "packed into one copy, direct = tensor by tensor; default: packed",
        choices=("kernel_ascend", "direct", "kernel"),
        proof="tests/ascend/emulation/test_tiers.py::test_pages_are_copied_in_the_way_that_is_asked_for",
    ),
    Flag(
        "hicache-mem-layout",
        "cache.host_layout",
        "page layout in host memory: page_first_direct = layer by layer, page_first (CUDA) and "
        "page_first_kv_split (NPU) = keys of all layers first; default: the latter for latent "
        "attention, else page_first_direct",
        choices=(
            *("page_first_direct", "page_first_kv_split"),
            *("layer_first", "page_first", "page_head"),
        ),
        proof="tests/ascend/emulation/test_tiers.py::test_the_layout_says_how_the_parts_of_a_page_lie",
    ),
    Flag(
        "hicache-storage-backend",
        "cache.store",
        "storage of KV cache pages: file = a folder that servers may share, nixl = the same "
        "through NIXL, mooncake = a Mooncake cluster, dynamic = the class that the extra config "
        "names (module_path, class_name), or the name of an installed store",
        elsewhere=(
            Elsewhere(
                "sim npu_memcache hf3fs aibrix eic simm mori shm tensorcast seaweedfs",
                "this storage backend is not supported",
                "use file, with a folder that all machines share, or dynamic with a class that "
                "reaches this storage",
            ),
        ),
        proof="tests/system/test_store.py::test_a_restarted_server_answers_from_the_store",
    ),
    Flag(
        "hicache-storage-backend-extra-config",
        "cache.store_options",
        "JSON options of the storage: path, max_bytes, fsync (file); prefetch_threshold in tokens, "
        "prefetch_timeout_base and prefetch_timeout_per_ki_token in seconds (all)",
        kind=JSON,
        proof="tests/system/test_store.py::test_a_restarted_server_answers_from_the_store",
    ),
    Flag(
        "hicache-write-policy",
        "cache.store_writes",
        "when pages are written to storage: write_through = once computed, write_through_selective "
        "= on second use, write_back = when evicted",
        choices=("write_through", "write_through_selective", "write_back"),
        proof="tests/system/test_store.py::test_the_write_policy_decides_what_is_stored",
    ),
    Flag(
        "hicache-storage-prefetch-policy",
        "cache.store_waits",
        "how long a request waits for pages from storage: best_effort = not at all, wait_complete "
        "= until all arrive, timeout = up to a time limit",
        choices=("best_effort", "wait_complete", "timeout"),
        proof="tests/system/test_store.py::test_the_prefetch_policy_decides_who_waits",
    ),
)
DISAGGREGATION_FLAGS = (
    Flag(
        "disaggregation-decode-tp",
        "handoff.decode_tp",
        "with --disaggregation-mode prefill: --tensor-parallel-size of its decode servers, others "
        "are refused; default: any, each server divides pages among its own ranks",
        kind=INT,
        low=1,
        high=4096,
        proof="tests/disaggregation/test_transfer.py"
        "::test_a_server_of_another_layout_than_announced_gets_nothing",
    ),
    Flag(
        "disaggregation-decode-dp",
        "handoff.decode_dp",
        "the same for --data-parallel-size",
        kind=INT,
        low=1,
        high=4096,
        proof="tests/disaggregation/test_transfer.py"
        "::test_a_server_of_another_layout_than_announced_gets_nothing",
    ),
    Flag(
        "disaggregation-prefill-pp",
        "handoff.prefill_pp",
        "with --disaggregation-mode decode: --pipeline-parallel-size of its prefill servers; "
        "others are refused; default: any",
        kind=INT,
        low=1,
        high=4096,
        proof="tests/disaggregation/test_transfer.py"
        "::test_a_server_of_another_layout_than_announced_gets_nothing",
    ),
    Flag(
        "disaggregation-decode-polling-interval",
        "handoff.polling_interval",
        "with --disaggregation-mode decode: steps after which it looks for prompts that have "
        "arrived, while others run",
        kind=INT,
        low=1,
        high=4096,
        proof="tests/scheduler/test_scheduler.py"
        "::test_a_decode_server_looks_for_prompts_after_so_many_steps",
    ),
    Flag(
        "disaggregation-mode",
        "handoff.mode",
        "role in prefill/decode disaggregation: prefill, decode, or null = both in one server",
        choices=("null", "prefill", "decode"),
        proof=_PAIR_TEST,
    ),
    Flag(
        "disaggregation-transfer-backend",
        "handoff.transfer",
        "how KV cache pages are transferred: tcp, mooncake, nixl or ascend (packages; ascend "
        "between NPUs), fake = nothing (load tests of one side), or the name of an installed "
        "backend",
        choices=("tcp", "mooncake", "nixl", "ascend", "fake"),
        plugins="banyan.transfers",
        elsewhere=(
            Elsewhere(
                "mori mooncake_tcp",
                "this transfer library is not supported",
                "use tcp, mooncake or nixl",
            ),
        ),
        proof="tests/system/test_handoff.py::test_a_fake_transfer_needs_no_other_server",
    ),
    Flag(
        "disaggregation-decode-enable-fake-auto",
        "handoff.fakes_prompts",
        "a decode server invents the prompt's pages of requests that name no bootstrap_host (load "
        "tests of one side)",
        kind=SWITCH,
        proof="tests/system/test_handoff.py"
        "::test_a_decode_server_invents_the_prompts_of_requests_without_a_host",
    ),
    Flag(
        "disaggregation-decode-enable-offload-kvcache",
        "handoff.offloads",
        "a decode server writes pages of prompts and answers to --hicache-storage-backend, where "
        "prefill servers with the same store find them",
        kind=SWITCH,
        proof="tests/system/test_handoff.py"
        "::test_a_second_turn_finds_what_the_decode_server_has_stored",
    ),
    Flag(
        "disaggregation-ib-device",
        "handoff.rdma_devices",
        "RDMA devices by which mooncake or nixl transfer pages; default: mooncake uses TCP, UCX "
        "chooses for nixl",
        kind=COMMAS,
        proof="tests/disaggregation/test_transfer_engine.py"
        "::test_the_devices_that_are_named_reach_the_engines",
    ),
    Flag(
        "mooncake-ib-device",
        "handoff.mooncake_devices",
        "RDMA devices of Mooncake: of its store, and of its transfers unless "
        "--disaggregation-ib-device names others; default: TCP",
        kind=COMMAS,
        proof="tests/disaggregation/test_transfer_engine.py"
        "::test_devices_of_mooncake_reach_its_store_and_its_transfers",
    ),
    Flag(
        "num-reserved-decode-tokens",
        "handoff.reserved_tokens",
        "a decode server admits a request only if pages for this many further tokens of each "
        "running one stay free",
        kind=INT,
        low=0,
        high=1 << 31,
        proof="tests/scheduler/test_growth.py::test_a_decode_server_keeps_the_tokens_given",
    ),
    Flag(
        "disaggregation-bootstrap-port",
        "handoff.port",
        "port where a prefill server hands over its KV cache; further replicas use the following "
        "ports",
        kind=INT,
        low=1,
        high=65535,
        proof=_PAIR_TEST,
    ),
)
