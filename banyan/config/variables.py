"""Environment variables of SGLang and its libraries: honoured, ignored with a note, or refused.

A variable is refused if ignoring it would change answers, limits or security. Messages never
contain values.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from banyan.config.flags.flag import FLOAT, FOREVER_S, INT, SWITCH, Flag

_PREFIXES = ("SGLANG_", "SGL_", "HCCL_", "ASCEND_")
_OFF = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Refusal:
    """Why a variable is refused, what to use instead, and the values that are accepted as off."""

    why: str
    use: str
    neutral: tuple[str, ...] = _OFF


OF_ASCEND = "it concerns Ascend NPUs only"
"""Why a variable of Ascend NPUs has no effect on other devices."""
_NO_ASCEND = "--kernels chooses the kernels of Ascend devices"
_NO_TRANSFER = "the transfer engine of Ascend NPUs is not used"
_HEARTBEAT = "a prefill server that is silent for 5 s counts as dead"
_ONE_THREAD = "one thread transfers the KV cache between servers"
_NO_POLLING = "a compiled grammar wakes its requests; --grammar-timeout limits the wait"

IDLE = {
    "PYTORCH_NPU_ALLOC_CONF": OF_ASCEND,
    "STREAMS_PER_DEVICE": OF_ASCEND,
    "HCCL_BUFFSIZE": OF_ASCEND,
    "DEEPEP_HCCL_BUFFSIZE": OF_ASCEND,
    "HCCL_SOCKET_IFNAME": OF_ASCEND,
    "HCCL_OP_EXPANSION_MODE": OF_ASCEND,
    "TASK_QUEUE_ENABLE": OF_ASCEND,
    "SGLANG_NPU_USE_MLAPO": "the fused operator MLAPO exists on Ascend NPUs only",
    "SGLANG_USE_FIA_NZ": "the fractal page layout (NZ) exists on Ascend NPUs only",
    "SGLANG_USE_AG_AFTER_QLORA": _NO_ASCEND,
    "ASCEND_MF_STORE_URL": _NO_TRANSFER,
    "MF_CONFIG_STORE_URL": _NO_TRANSFER,
    "DEEP_NORMAL_MODE_USE_INT8_QUANT": "rows are sent to experts without quantization",
    "SGLANG_SCHEDULER_SKIP_ALL_GATHER": "the scheduler broadcasts one plan and gathers nothing",
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "planning overlaps with the running step already",
    "SGLANG_ENABLE_SPEC_V2": "speculative steps overlap already",
    "SGLANG_SIMULATE_ACC_LEN": "acceptance lengths are measured, not simulated",
    "SGLANG_ENABLE_FLASHINFER_FP8_GEMM": "fp8 weights use the device's own kernels",
    "SGLANG_SUPPORT_CUTLASS_BLOCK_FP8": "fp8 weights use the device's own kernels",
    "VLLM_TARGET_DEVICE": "vLLM is not used",
    "SGLANG_TEST_RETRACT": "use a small --max-total-tokens to test retraction",
    "SGLANG_FORCE_STREAM_INTERVAL": "tokens are detokenized as they arrive",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "/health checks the engine's heartbeat; "
    "/health_generate generates",
    "SGLANG_WAIT_WEIGHTS_READY_TIMEOUT": "a server waits for its weights without a time limit",
    "SGLANG_WARMUP_TIMEOUT": "the warm-up has no time limit",
    "SGLANG_PROFILE_WITH_STACK": "profiles have step phases and ops, but no stacks",
    "SGLANG_GRAMMAR_POLL_INTERVAL": _NO_POLLING,
    "SGLANG_GRAMMAR_MAX_POLL_ITERATIONS": _NO_POLLING,
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": _HEARTBEAT,
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": _HEARTBEAT,
    "SGLANG_DISAGGREGATION_QUEUE_SIZE": _ONE_THREAD,
    "SGLANG_DISAGGREGATION_THREAD_POOL_SIZE": _ONE_THREAD,
    "SGLANG_CACHE_DIR": "compiled kernels are in ~/.cache/banyan; nothing else is cached",
    "TORCHINDUCTOR_CACHE_DIR": "torch.compile is not used",
    "SGLANG_IS_IN_CI": "tests run the same way in CI",
    "PROMETHEUS_MULTIPROC_DIR": "one process serves /metrics; nothing has to be collected",
}
"""Name -> why it has no effect."""

QUIET = (
    "TORCHINDUCTOR_CACHE_DIR",
    *("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "ASCEND_AICPU_PATH"),
)
"""Set by installed libraries, not by the user: no note is logged."""

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
"""Variables that the start rules of Ascend NPUs check."""

REFUSED = {
    "SGLANG_ENABLE_REQUEST_DECOMPRESSION": Refusal(
        "compressed request bodies are not supported", "decompress in a proxy"
    ),
    "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": Refusal(
        "headers do not override request fields", "set the fields in the body"
    ),
    "SGLANG_LOG_REQUEST_HEADERS": Refusal("headers are never logged", "let a proxy log them"),
    "SGLANG_RADIX_FORCE_MISS": Refusal(
        "cached prefixes are always used", "use --disable-radix-cache"
    ),
    "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE": Refusal(
        "the size limit is an option of the storage",
        "use max_bytes in --hicache-storage-backend-extra-config",
    ),
    "SGLANG_EXTERNAL_MODEL_PACKAGE": Refusal(
        "no code is loaded through a variable", "register the package's entry points"
    ),
    "SGLANG_TOOL_STRICT_LEVEL": Refusal(
        "each tool of a request sets whether its calls are constrained",
        "set strict: true in the tools",
    ),
    "SGLANG_FORWARD_UNKNOWN_TOOLS": Refusal(
        "the tool-call parser decides about calls of unknown tools", "list the tool in the request"
    ),
    "AIP_PREDICT_ROUTE": Refusal(
        "the Vertex AI route is /vertex_generate", "use that route", ("", "/vertex_generate")
    ),
    **{
        f"SGLANG_OLLAMA_{name}_ROUTE": Refusal(
            "Ollama's routes have fixed paths", "map other paths in a proxy", ("",)
        )
        for name in ("ROOT", "CHAT", "GENERATE", "TAGS", "SHOW")
    },
}

SETTINGS = {
    setting.name: setting
    for setting in (
        Flag(
            "GLOO_SOCKET_IFNAME",
            "parallel.interface",
            "network interface whose address a rank listens on between machines; default: the one "
            "that reaches the other ranks",
            proof="tests/parallel/test_collectives.py"
            "::test_gloo_listens_on_the_interface_that_is_named",
        ),
        Flag(
            "SGLANG_INIT_NEW_TOKEN_RATIO",
            "schedule.new_token_ratio",
            "initial estimate of how much of max_new_tokens a request will use, as a fraction",
            kind=FLOAT,
            low=0.0,
            high=1.0,
            proof="tests/scheduler/test_growth.py::test_the_first_expectation_is_the_one_given",
        ),
        Flag(
            "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR",
            "schedule.new_token_floor",
            "lower bound of that estimate, as a fraction of the initial one",
            kind=FLOAT,
            low=0.0,
            high=1.0,
            proof="tests/scheduler/test_growth.py::test_the_expectation_falls_to_the_floor_given",
        ),
        Flag(
            "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
            "schedule.new_token_decay",
            "decode steps in which the estimate falls from the initial one to the lower bound",
            kind=INT,
            low=1,
            proof="tests/scheduler/test_growth.py::test_the_expectation_falls_in_the_steps_given",
        ),
        Flag(
            "SGLANG_RETURN_ORIGINAL_LOGPROB",
            "schedule.raw_logprobs",
            "report log-probabilities of the raw logits, before masks, biases, penalties and "
            "temperature",
            kind=SWITCH,
            proof="tests/system/test_logprobs.py::test_a_variable_reports_the_raw_values",
        ),
        Flag(
            "SGLANG_RETRACT_DECODE_STEPS",
            "schedule.retract_steps",
            "decode steps for which a retraction frees enough KV cache",
            kind=INT,
            low=0,
            proof="tests/scheduler/test_growth.py::test_a_retraction_makes_the_room_given",
        ),
        Flag(
            "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",
            "schedule.clip_new_tokens",
            "upper limit of remaining output tokens in the scheduler's estimate",
            kind=INT,
            low=1,
            proof="tests/scheduler/test_growth.py::test_longer_outputs_are_counted_as_those_given",
        ),
        Flag(
            "SGLANG_REQ_WAITING_TIMEOUT",
            "schedule.wait_s",
            "maximum seconds in the queue, then 503; -1 = no limit",
            kind=FLOAT,
            low=-1.0,
            high=FOREVER_S,
            proof="tests/scheduler/test_fair_queue.py::test_who_waits_too_long_for_a_place_ends_alone",
        ),
        Flag(
            "SGLANG_REQ_RUNNING_TIMEOUT",
            "schedule.run_s",
            "maximum seconds of running, then 503; -1 = no limit",
            kind=FLOAT,
            low=-1.0,
            high=FOREVER_S,
            proof="tests/scheduler/test_fair_queue.py::test_who_runs_too_long_ends_alone",
        ),
        Flag(
            "SGLANG_MAX_NEW_TOKENS_LIMIT",
            "server.max_new_tokens",
            "maximum output tokens of any request; larger values are lowered with a warning",
            kind=INT,
            low=1,
            proof="tests/requests/test_sampling_params.py::test_no_answer_is_longer_than_the_operator_s_limit",
        ),
        Flag(
            "SGLANG_TIMEOUT_KEEP_ALIVE",
            "server.keep_alive_s",
            "seconds that an idle connection stays open",
            kind=INT,
            low=1,
            high=FOREVER_S,
            proof="tests/server/test_serve.py::test_idle_connections_end_after_the_seconds_given",
        ),
        Flag(
            "SGLANG_HEALTH_CHECK_TIMEOUT",
            "server.heartbeat_timeout_s",
            "seconds without an engine heartbeat after which /health answers 503",
            kind=FLOAT,
            low=0.5,
            high=FOREVER_S,
            proof="tests/server/test_serve.py::test_an_engine_may_be_silent_for_the_seconds_given",
        ),
        Flag(
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
            "cache.store_path",
            "folder of --hicache-storage-backend file, unless its extra configuration sets a path",
            proof="tests/config/test_hicache.py::test_a_variable_names_the_folder_of_the_store",
        ),
        Flag(
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
            "handoff.patience_s",
            "seconds that a decode server waits for a prompt from a prefill server",
            kind=FLOAT,
            low=0.1,
            high=FOREVER_S,
            proof="tests/system/test_handoff.py::test_a_room_that_never_comes_fails_in_time",
        ),
        Flag(
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
            "handoff.lease_s",
            "seconds that a prefill server keeps a finished prompt for the decode server",
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
            "with --moe-a2a-backend deepep: maximum tokens per rank exchanged at once; 0 = no "
            "limit, with --deepep-mode normal",
            kind=INT,
            low=0,
            high=1024,
            proof="tests/moe/test_dispatch_rules.py::test_a_variable_is_the_bound",
        ),
        Flag(
            "SGLANG_NPU_USE_MULTI_STREAM",
            "experts.has_side_stream",
            "run shared experts on a second stream, in parallel with the routed experts (CUDA, "
            "NPU)",
            kind=SWITCH,
            proof="tests/ascend/emulation/test_side_streams.py::test_a_variable_gives_shared_experts_a_stream",
        ),
        Flag(
            "SGLANG_NPU_FUSED_MOE_MODE",
            "experts.fuse_mode",
            "operator of --moe-a2a-backend ascend_fuseep: 1 = fused_deep_moe, 2 = "
            "dispatch_ffn_combine",
            kind=INT,
            low=1,
            high=2,
            proof="tests/ascend/emulation/test_fused.py::test_a_variable_says_which_operator_it_is",
        ),
        Flag(
            "SGLANG_SET_CPU_AFFINITY",
            "device.pins_cores",
            "pin each rank to its own cores",
            kind=SWITCH,
            proof="tests/engine/test_placement.py"
            "::test_a_variable_gives_each_rank_cores_of_its_own",
        ),
    )
}
"""Variables that set a config field, like a flag; empty ones are ignored."""

HONOURED = (
    "SGLANG_USE_MODELSCOPE",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    *SETTINGS,
)
"""SGLang's variables that have an effect."""

LIBRARIES = ("HF_TOKEN",)
"""Variables that the libraries read by themselves."""


READ = {
    "HF_HOME": "folder whose subfolder `hub` is the hub cache",
    "HF_HUB_CACHE": "the hub cache folder itself",
    "HF_ENDPOINT": "address of the hub",
    "HF_HUB_OFFLINE": "1 = never contact the hub, as `--offline`",
    "TRANSFORMERS_OFFLINE": "the same as HF_HUB_OFFLINE",
    "BANYAN_CONFIG": "file of flags, as `--config`; files of the command line override it",
    "BANYAN_USE_MODELSCOPE": "1 = download models from ModelScope",
    "BANYAN_ALLOW_LONGER_CONTEXT": "1 = `--context-length` may exceed the model's own",
}
"""Other variables that `config/env.py` reads, and their meaning."""


def notes_on(given: Mapping[str, str]) -> tuple[str, ...]:
    """Notes on variables that are set and have no effect."""
    found: list[str] = []
    for name in sorted(given):
        if name in IDLE and name not in QUIET:
            found.append(f"{name} is set but has no effect: {IDLE[name]}")
        elif name in REFUSED and _asks_for_nothing(name, given[name]):
            found.append(f"{name} is set to the behaviour that applies anyway")
        elif name.startswith(_PREFIXES) and name not in (*REFUSED, *HONOURED, *QUIET):
            found.append(f"{name} is set but has no effect in this build")
    return tuple(found)


def refusals_of(given: Mapping[str, str]) -> tuple[str, ...]:
    """Errors for variables that must not be ignored, sorted by name."""
    return tuple(
        f"{name} is not available in this build: {REFUSED[name].why} ({REFUSED[name].use})"
        for name in sorted(given)
        if name in REFUSED and not _asks_for_nothing(name, given[name])
    )


def _asks_for_nothing(name: str, text: str) -> bool:
    return text.strip().lower() in REFUSED[name].neutral
