"""Flags of adapters (LoRA): which there are, how large, and how many at once."""

from banyan.config.flags.flag import FLOAT, INT, SWITCH, WORDS, Flag

FLAGS = (
    Flag(
        "enable-lora",
        "lora.is_enabled",
        "requests may name adapters (docs/lora.md); on where --lora-paths names some",
        kind=SWITCH,
        proof="tests/system/test_lora.py::test_without_the_flag_no_adapter_is_taken",
    ),
    Flag(
        "lora-paths",
        "lora.paths",
        "adapters of the start: NAME=FOLDER, FOLDER, or JSON with lora_name, lora_path and pinned",
        kind=WORDS,
        shown="NAME=FOLDER …",
        proof="tests/system/test_lora.py"
        "::test_each_adapter_answers_as_weights_that_it_is_merged_into",
    ),
    Flag(
        "max-lora-rank",
        "lora.max_rank",
        "highest rank of an adapter; default: the highest that --lora-paths names",
        kind=INT,
        low=1,
        proof="tests/lora/test_rules.py::test_what_cannot_be_served_is_refused_by_name",
    ),
    Flag(
        "lora-target-modules",
        "lora.targets",
        "projections that adapters may change, by the last part of their names; default: all",
        kind=WORDS,
        pattern="[a-z0-9_]+",
        shown="NAME …",
        proof="tests/models/test_adapters.py"
        "::test_an_adapter_of_projections_that_are_not_open_is_refused",
    ),
    Flag(
        "max-loras-per-batch",
        "lora.max_running",
        "adapters that requests which run at once have between them",
        kind=INT,
        low=1,
        proof="tests/lora/test_scheduling.py::test_no_more_adapters_run_at_once_than_told",
    ),
    Flag(
        "max-loaded-loras",
        "lora.max_loaded",
        "adapters in memory; one more takes the place of one that nobody uses; default: 256, on "
        "NPUs and CUDA devices, which have room for each from the start on, as many as run at once",
        kind=INT,
        low=1,
        high=4096,
        proof="tests/lora/test_scheduling.py"
        "::test_an_adapter_that_nobody_uses_makes_room_for_another",
    ),
    Flag(
        "lora-memory-gib",
        "lora.memory_gib",
        "memory of all adapters on each rank, in GiB; one more takes the place of those that "
        "nobody uses, and on NPUs and CUDA devices ends the start; default: half of what the cache "
        "leaves free",
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
        "which adapter makes room: lru = the one that was used longest ago, fifo = the one that "
        "was loaded first",
        choices=("lru", "fifo"),
        proof="tests/lora/test_scheduling.py::test_the_policy_says_which_adapter_makes_room",
    ),
)
