"""LoRA flags."""

from banyan.config.flags.flag import FLOAT, INT, SWITCH, WORDS, Flag

FLAGS = (
    Flag(
        "enable-lora",
        "lora.is_enabled",
        "allow LoRA adapters in requests (docs/lora.md); implied by --lora-paths",
        kind=SWITCH,
        proof="tests/system/test_lora.py::test_without_the_flag_no_adapter_is_taken",
    ),
    Flag(
        "lora-paths",
        "lora.paths",
        "adapters to load at start: NAME=FOLDER, FOLDER, or JSON with lora_name, lora_path and "
        "pinned",
        kind=WORDS,
        shown="NAME=FOLDER …",
        proof="tests/system/test_lora.py"
        "::test_each_adapter_answers_as_weights_that_it_is_merged_into",
    ),
    Flag(
        "max-lora-rank",
        "lora.max_rank",
        "maximum adapter rank; default: the highest rank in --lora-paths",
        kind=INT,
        low=1,
        proof="tests/lora/test_rules.py::test_what_cannot_be_served_is_refused_by_name",
    ),
    Flag(
        "lora-target-modules",
        "lora.targets",
        "modules that adapters may target, by the last part of their names; default: all",
        kind=WORDS,
        pattern="[a-z0-9_]+",
        shown="NAME …",
        proof="tests/models/test_adapters.py"
        "::test_an_adapter_of_projections_that_are_not_open_is_refused",
    ),
    Flag(
        "max-loras-per-batch",
        "lora.max_running",
        "maximum number of different adapters among running requests",
        kind=INT,
        low=1,
        proof="tests/lora/test_scheduling.py::test_no_more_adapters_run_at_once_than_told",
    ),
    Flag(
        "max-loaded-loras",
        "lora.max_loaded",
        "maximum number of adapters in memory; a further one evicts an unused one; default: 256, "
        "on NPU and CUDA (preallocated) the value of --max-loras-per-batch",
        kind=INT,
        low=1,
        high=4096,
        proof="tests/lora/test_scheduling.py"
        "::test_an_adapter_that_nobody_uses_makes_room_for_another",
    ),
    Flag(
        "lora-memory-gib",
        "lora.memory_gib",
        "GiB per rank for adapters; a further one evicts unused ones, and too little on NPU or "
        "CUDA is an error at start; default: half of the memory that the KV cache leaves free",
        kind=FLOAT,
        low=0.001,
        high=1 << 20,
        documented=False,
        proof="tests/lora/test_scheduling.py"
        "::test_adapters_make_room_until_what_the_next_one_needs_is_free",
    ),
    Flag(
        "lora-eviction-policy",
        "lora.eviction",
        "which adapter to evict: lru = least recently used, fifo = loaded first",
        choices=("lru", "fifo"),
        proof="tests/lora/test_scheduling.py::test_the_policy_says_which_adapter_makes_room",
    ),
)
