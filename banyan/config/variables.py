"""Environment variables of others that have no effect here: which are reported, and which refused.

A variable is refused when answers, limits or security would silently differ without it. Values are
never shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from banyan.config.flags.flag import FLOAT, FOREVER_S, INT, SWITCH, Flag

_PREFIXES = ("SGLANG_", "SGL_", "HCCL_", "ASCEND_")
_OFF = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Refusal:
    """Why a variable is refused, what to use, and the values that ask for nothing."""

    why: str
    use: str
    neutral: tuple[str, ...] = _OFF


OF_ASCEND = "only the libraries of Ascend NPUs read it, and the rules of a start on one"
"""Said of a variable where the device is another one."""
_NO_ASCEND = "--kernels chooses the kernels of Ascend devices"
_NO_TRANSFER = "no transfer engine of Ascend devices is used"
_OWN_BEAT = "a server that computes prompts is taken for dead when it is silent for 5 s"
_ONE_THREAD = "one thread carries what servers hand over"
_NO_POLLING = "a request is told when its grammar is compiled; --grammar-timeout bounds the wait"

IDLE = {
    "GLOO_SOCKET_IFNAME": "a rank listens at the address from which it reaches the others",
    "PYTORCH_NPU_ALLOC_CONF": OF_ASCEND,
    "STREAMS_PER_DEVICE": OF_ASCEND,
    "HCCL_BUFFSIZE": OF_ASCEND,
    "DEEPEP_HCCL_BUFFSIZE": OF_ASCEND,
    "HCCL_SOCKET_IFNAME": OF_ASCEND,
    "HCCL_OP_EXPANSION_MODE": OF_ASCEND,
    "TASK_QUEUE_ENABLE": OF_ASCEND,
    "SGLANG_NPU_USE_MLAPO": "only Ascend NPUs have an operator for all before latent attention",
    "SGLANG_USE_FIA_NZ": "only Ascend NPUs read pages in the fractal form",
    "SGLANG_USE_AG_AFTER_QLORA": _NO_ASCEND,
    "ASCEND_MF_STORE_URL": _NO_TRANSFER,
    "DEEP_NORMAL_MODE_USE_INT8_QUANT": "rows go to their experts with all their bits",
    "SGLANG_SCHEDULER_SKIP_ALL_GATHER": "one plan is broadcast, and nothing is gathered",
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "a step is planned while another runs",
    "SGLANG_ENABLE_SPEC_V2": "drafts are verified in steps that overlap",
    "SGLANG_SIMULATE_ACC_LEN": "drafts count as often as they come true",
    "SGLANG_ENABLE_FLASHINFER_FP8_GEMM": "the kernels of the device at hand multiply fp8 weights",
    "SGLANG_SUPPORT_CUTLASS_BLOCK_FP8": "the kernels of the device at hand multiply fp8 weights",
    "VLLM_TARGET_DEVICE": "no part of vLLM is used",
    "SGLANG_TEST_RETRACT": "tests make the cache small instead",
    "SGLANG_FORCE_STREAM_INTERVAL": "answers are decoded as their tokens come",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "/health looks at the engine's heartbeat, and "
    "/health_generate generates",
    "SGLANG_WAIT_WEIGHTS_READY_TIMEOUT": "weights are read from files only",
    "SGLANG_WARMUP_TIMEOUT": "a start takes as long as its model needs",
    "SGLANG_PROFILE_WITH_STACK": "a profile has the phases of a step and its ops, never stacks",
    "SGLANG_GRAMMAR_POLL_INTERVAL": _NO_POLLING,
    "SGLANG_GRAMMAR_MAX_POLL_ITERATIONS": _NO_POLLING,
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": _OWN_BEAT,
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": _OWN_BEAT,
    "SGLANG_DISAGGREGATION_QUEUE_SIZE": _ONE_THREAD,
    "SGLANG_DISAGGREGATION_THREAD_POOL_SIZE": _ONE_THREAD,
    "SGLANG_CACHE_DIR": "compiled kernels lie in ~/.cache/banyan, and nothing else is cached",
    "TORCHINDUCTOR_CACHE_DIR": "torch.compile compiles nothing here",
    "SGLANG_IS_IN_CI": "tests and servers run alike everywhere",
    "PROMETHEUS_MULTIPROC_DIR": "there is nothing to collect; read /v1/loads?format=prometheus",
}
"""Name -> why nothing depends on it."""

QUIET = (
    "TORCHINDUCTOR_CACHE_DIR",
    *("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "ASCEND_AICPU_PATH"),
)
"""Libraries set these by themselves: nobody has asked for anything."""

OF_LAUNCHES = (
    *("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "STREAMS_PER_DEVICE", "TASK_QUEUE_ENABLE"),
    *("HCCL_BUFFSIZE", "DEEPEP_HCCL_BUFFSIZE", "HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    *("HCCL_OP_EXPANSION_MODE", "ASCEND_MF_STORE_URL", "DEEP_NORMAL_MODE_USE_INT8_QUANT"),
    *("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "SGLANG_SCHEDULER_SKIP_ALL_GATHER"),
    *("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "SGLANG_ENABLE_SPEC_V2", "SGLANG_SET_CPU_AFFINITY"),
    *("SGLANG_NPU_FUSED_MOE_MODE", "SGLANG_NPU_USE_MLAPO", "SGLANG_USE_FIA_NZ"),
    *("SGLANG_NPU_USE_MULTI_STREAM", "SGLANG_USE_AG_AFTER_QLORA", "DEEPEP_NORMAL_LONG_SEQ_ROUND"),
    *("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"),
)
"""What the rules of `banyan/launch` read; a start on an Ascend NPU is held against them."""

REFUSED = {
    "SGLANG_ENABLE_REQUEST_DECOMPRESSION": Refusal(
        "bodies are never decompressed", "let a proxy do it"
    ),
    "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": Refusal(
        "headers never change a request", "set the fields in the body"
    ),
    "SGLANG_LOG_REQUEST_HEADERS": Refusal("headers are never logged", "let a proxy log them"),
    "SGLANG_RADIX_FORCE_MISS": Refusal(
        "a prefix that is cached is used", "use --disable-radix-cache"
    ),
    "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE": Refusal(
        "the store takes its bound with its other options",
        "use max_bytes in --hicache-storage-backend-extra-config",
    ),
    "SGLANG_EXTERNAL_MODEL_PACKAGE": Refusal(
        "no code is loaded by a variable", "register the package's entry points"
    ),
    "SGLANG_TOOL_STRICT_LEVEL": Refusal(
        "each tool of a request says whether its calls are constrained",
        "set strict: true in the tools",
    ),
    "SGLANG_FORWARD_UNKNOWN_TOOLS": Refusal(
        "the form of the calls decides on tools that were not offered", "offer the tool"
    ),
    "AIP_PREDICT_ROUTE": Refusal(
        "the Vertex AI route is /vertex_generate", "name that one", ("", "/vertex_generate")
    ),
    **{
        f"SGLANG_OLLAMA_{name}_ROUTE": Refusal(
            "Ollama's routes keep their paths", "let a proxy map others to them", ("",)
        )
        for name in ("ROOT", "CHAT", "GENERATE", "TAGS", "SHOW")
    },
}

SETTINGS = {
    setting.name: setting
    for setting in (
        Flag(
            "SGLANG_INIT_NEW_TOKEN_RATIO",
            "schedule.new_token_ratio",
            "share of its allowed output that a request is at first expected to produce",
            kind=FLOAT,
            low=0.0,
            high=1.0,
            proof="tests/scheduler/test_growth.py::test_the_first_expectation_is_the_one_given",
        ),
        Flag(
            "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR",
            "schedule.new_token_floor",
            "share of that below which the expectation does not fall",
            kind=FLOAT,
            low=0.0,
            high=1.0,
            proof="tests/scheduler/test_growth.py::test_the_expectation_falls_to_the_floor_given",
        ),
        Flag(
            "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
            "schedule.new_token_decay",
            "steps that generate from the one to the other",
            kind=INT,
            low=1,
            proof="tests/scheduler/test_growth.py::test_the_expectation_falls_in_the_steps_given",
        ),
        Flag(
            "SGLANG_RETRACT_DECODE_STEPS",
            "schedule.retract_steps",
            "steps of room that a retraction should have made",
            kind=INT,
            low=0,
            proof="tests/scheduler/test_growth.py::test_a_retraction_makes_the_room_given",
        ),
        Flag(
            "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",
            "schedule.clip_new_tokens",
            "longer remaining outputs are counted as this many tokens",
            kind=INT,
            low=1,
            proof="tests/scheduler/test_growth.py::test_longer_outputs_are_counted_as_those_given",
        ),
        Flag(
            "SGLANG_REQ_WAITING_TIMEOUT",
            "schedule.wait_s",
            "seconds that a request may wait until it runs, then it ends with 503; -1 = any time",
            kind=FLOAT,
            low=-1.0,
            high=FOREVER_S,
            proof="tests/scheduler/test_fair_queue.py::test_who_waits_too_long_for_a_place_ends_alone",
        ),
        Flag(
            "SGLANG_REQ_RUNNING_TIMEOUT",
            "schedule.run_s",
            "seconds that a request may run, then it ends with 503; -1 = any time",
            kind=FLOAT,
            low=-1.0,
            high=FOREVER_S,
            proof="tests/scheduler/test_fair_queue.py::test_who_runs_too_long_ends_alone",
        ),
        Flag(
            "SGLANG_MAX_NEW_TOKENS_LIMIT",
            "server.max_new_tokens",
            "most tokens of an answer; a request that asks for more gets these and a warning",
            kind=INT,
            low=1,
            proof="tests/requests/test_sampling_params.py::test_no_answer_is_longer_than_the_operator_s_limit",
        ),
        Flag(
            "SGLANG_TIMEOUT_KEEP_ALIVE",
            "server.keep_alive_s",
            "seconds that a connection without a request stays open",
            kind=INT,
            low=1,
            high=FOREVER_S,
            proof="tests/server/test_serve.py::test_idle_connections_end_after_the_seconds_given",
        ),
        Flag(
            "SGLANG_HEALTH_CHECK_TIMEOUT",
            "server.heartbeat_timeout_s",
            "seconds of the engine's silence after which /health is 503",
            kind=FLOAT,
            low=0.5,
            high=FOREVER_S,
            proof="tests/server/test_serve.py::test_an_engine_may_be_silent_for_the_seconds_given",
        ),
        Flag(
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
            "cache.store_path",
            "folder of --hicache-storage-backend file, where its extra configuration names none",
            proof="tests/config/test_hicache.py::test_a_variable_names_the_folder_of_the_store",
        ),
        Flag(
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
            "handoff.patience_s",
            "seconds that a prompt which another server computes is waited for",
            kind=FLOAT,
            low=0.1,
            high=FOREVER_S,
            proof="tests/system/test_handoff.py::test_a_room_that_never_comes_fails_in_time",
        ),
        Flag(
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
            "handoff.lease_s",
            "seconds that a computed prompt is kept for the server that continues it",
            kind=FLOAT,
            low=0.1,
            high=FOREVER_S,
            proof="tests/system/test_handoff.py::test_a_room_that_nobody_takes_is_given_back",
        ),
        Flag(
            "SGLANG_TORCH_PROFILER_DIR",
            "observe.profile_dir",
            "folder of the files that /stop_profile writes",
            proof="tests/system/test_profile.py::test_a_profile_lies_in_the_folder_of_the_variable",
        ),
        Flag(
            "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR",
            "experts.folder",
            "folder of the files that /dump_expert_distribution_record writes",
            proof="tests/system/test_expert_record.py"
            "::test_what_is_recorded_equals_the_choices_of_the_routers",
        ),
        Flag(
            "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
            "experts.a2a_tokens",
            "with --moe-a2a-backend deepep: tokens of one rank whose rows travel at once; 0 = no "
            "bound, with --deepep-mode normal",
            kind=INT,
            low=0,
            high=1024,
            proof="tests/moe/test_dispatch_rules.py::test_a_variable_is_the_bound",
        ),
        Flag(
            "SGLANG_NPU_USE_MULTI_STREAM",
            "experts.has_lane",
            "on devices with streams: the experts that every token goes through run on a second "
            "one, beside those that it chooses",
            kind=SWITCH,
            proof="tests/ascend/emulation/test_lanes.py::test_a_variable_gives_shared_experts_a_stream",
        ),
        Flag(
            "SGLANG_NPU_FUSED_MOE_MODE",
            "experts.fuse_mode",
            "which operator --moe-a2a-backend ascend_fuseep is: fused_deep_moe (1), or "
            "dispatch_ffn_combine (2)",
            kind=INT,
            low=1,
            high=2,
            proof="tests/ascend/emulation/test_fused.py::test_a_variable_says_which_operator_it_is",
        ),
        Flag(
            "SGLANG_SET_CPU_AFFINITY",
            "device.pins_cores",
            "each rank keeps to cores of its own",
            kind=SWITCH,
            proof="tests/engine/test_placement.py"
            "::test_a_variable_gives_each_rank_cores_of_its_own",
        ),
    )
}
"""Variables that set a field, as a flag would; empty ones set nothing."""

HONOURED = (
    "SGLANG_USE_MODELSCOPE",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    *SETTINGS,
)
"""Variables of SGLang's that count."""

LIBRARIES = ("HF_TOKEN",)
"""Variables of the documents that the libraries beneath honour by themselves."""


READ = {
    "HF_HOME": "folder whose `hub` holds what the hub has given",
    "HF_HUB_CACHE": "that folder itself",
    "HF_ENDPOINT": "address of the hub",
    "HF_HUB_OFFLINE": "1 = never ask the hub, as `--offline`",
    "TRANSFORMERS_OFFLINE": "the same",
    "BANYAN_CONFIG": "a file of flags, as `--config`, before those of the command line",
    "BANYAN_USE_MODELSCOPE": "1 = hub ids are names on ModelScope",
    "BANYAN_ALLOW_LONGER_CONTEXT": "1 = `--context-length` may be more than the model's own",
}
"""Variables that `config/env.py` reads besides, and what they say."""


def notes_on(given: Mapping[str, str]) -> tuple[str, ...]:
    """One line for each variable that is set and has no effect."""
    found: list[str] = []
    for name in sorted(given):
        if name in IDLE and name not in QUIET:
            found.append(f"{name} is set without an effect: {IDLE[name]}")
        elif name in REFUSED and _asks_for_nothing(name, given[name]):
            found.append(f"{name} is set to what is so already")
        elif name.startswith(_PREFIXES) and name not in (*REFUSED, *HONOURED, *QUIET):
            found.append(f"{name} is set and has no effect in this build")
    return tuple(found)


def refusals_of(given: Mapping[str, str]) -> tuple[str, ...]:
    """What to tell about each variable that must not be ignored, sorted by name."""
    return tuple(
        f"{name} is not available in this build: {REFUSED[name].why} ({REFUSED[name].use})"
        for name in sorted(given)
        if name in REFUSED and not _asks_for_nothing(name, given[name])
    )


def _asks_for_nothing(name: str, text: str) -> bool:
    return text.strip().lower() in REFUSED[name].neutral
