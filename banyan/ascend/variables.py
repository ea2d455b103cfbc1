"""The variables of the documents for Ascend NPUs. A library reads the variable, the rules check it,
it has no effect because its behaviour always applies, or it is refused by name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_OFF = ("", "0", "false", "no", "off")
READ, SET, SO, REFUSED = "read by a library", "works", "so already", "refused"


@dataclass(frozen=True)
class Variable:
    """
    Attributes:
        outcome: READ, SET, SO or REFUSED.
        meaning: who reads it, its effect, or why it is refused.
        use: the replacement of a refused one.
    """

    outcome: str
    meaning: str
    use: str = "unset it"


_TORCH_NPU = "torch_npu, at its import"
_HCCL = "HCCL, for groups of several devices"

VARIABLES = {
    "PYTORCH_NPU_ALLOC_CONF": Variable(READ, f"{_TORCH_NPU}; rules 13"),
    "STREAMS_PER_DEVICE": Variable(READ, f"{_TORCH_NPU}; rule 12"),
    "TASK_QUEUE_ENABLE": Variable(READ, f"{_TORCH_NPU}; rules 11"),
    "ASCEND_RT_VISIBLE_DEVICES": Variable(READ, "CANN; --base-gpu-id counts among those it names"),
    "ASCEND_LAUNCH_BLOCKING": Variable(READ, _TORCH_NPU),
    "ASCEND_TOOLKIT_HOME": Variable(READ, "CANN; `banyan doctor` looks for it"),
    "ASCEND_HOME_PATH": Variable(READ, "CANN; `banyan doctor` looks for it"),
    "HCCL_BUFFSIZE": Variable(
        READ,
        "HCCL, and passed to each group of devices; rule 9, `banyan check` prints what is needed",
    ),
    "HCCL_SOCKET_IFNAME": Variable(READ, f"{_HCCL}; rules 14"),
    "GLOO_SOCKET_IFNAME": Variable(SET, "the interface that a rank listens on; rules 14"),
    "HCCL_OP_EXPANSION_MODE": Variable(READ, f"{_HCCL}; rule 22"),
    "HCCL_INTRA_PCIE_ENABLE": Variable(READ, _HCCL),
    "HCCL_INTRA_ROCE_ENABLE": Variable(READ, _HCCL),
    "SGLANG_SET_CPU_AFFINITY": Variable(SET, "each rank keeps to cores of its own; rule 23m"),
    "SGLANG_SCHEDULER_SKIP_ALL_GATHER": Variable(SO, "one plan is broadcast, nothing is gathered"),
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": Variable(SO, "a step is planned while another runs"),
    "SGLANG_ENABLE_SPEC_V2": Variable(SO, "what follows is planned while drafts are verified"),
    "ASCEND_USE_FIA": Variable(SO, "the fused infer attention is what attends"),
    "SGLANG_NPU_USE_MLAPO": Variable(
        SET,
        "what comes before latent attention is one operator (`npu_mla_prolog_v3`), or the log says "
        "why not; rules 5",
    ),
    "SGLANG_USE_FIA_NZ": Variable(
        SET, "pages of latent attention have the fractal form (NZ); rules 2b and 5"
    ),
    "SGLANG_NPU_USE_MULTI_STREAM": Variable(
        SET, "the shared experts run on a second stream, at the same time as the others; rule 6a"
    ),
    "SGLANG_NPU_FUSED_MOE_MODE": Variable(
        SET, "--moe-a2a-backend ascend_fuseep: which of two operators it is; rules 4"
    ),
    "SGLANG_USE_AG_AFTER_QLORA": Variable(
        SO, "ranks gather latents and keys alone, after the projections; no inputs before them"
    ),
    "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": Variable(
        SET, "--deepep-mode low_latency and auto: tokens of a rank in one exchange; rules 7 and 8"
    ),
    "DEEPEP_HCCL_BUFFSIZE": Variable(
        READ, "as HCCL_BUFFSIZE, of the group that experts are exchanged in; rule 9"
    ),
    "DEEP_NORMAL_MODE_USE_INT8_QUANT": Variable(
        SET, "--deepep-mode normal and auto: rows sent by their counts are of 8 bits; rule 21"
    ),
    "DEEPEP_NORMAL_LONG_SEQ_ROUND": Variable(REFUSED, "rows of a step go in one round"),
    "DEEP_USE_MODE": Variable(REFUSED, "rows go by one exchange of HCCL, all to all"),
    "ASCEND_MF_STORE_URL": Variable(READ, "MemFabric, whose engines meet there; rules 15"),
    "MF_CONFIG_STORE_URL": Variable(READ, "as ASCEND_MF_STORE_URL, the newer name"),
    "ASCEND_MF_TRANSFER_PROTOCOL": Variable(
        READ, "MemFabric: sdma or device_rdma, else the chip's"
    ),
    "ASCEND_NPU_PHY_ID": Variable(REFUSED, "MemFabric gets the number that CANN counts by"),
    "ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE": Variable(
        REFUSED,
        "a transfer engine is named by its flag",
        "use --disaggregation-transfer-backend mooncake",
    ),
}


def refusals_on_npu(given: Mapping[str, str]) -> tuple[str, ...]:
    """Lines about variables that ask for an absent feature; values are not shown."""
    return tuple(
        f"{name} is not available in this build on npu: {variable.meaning} ({variable.use})"
        for name, variable in VARIABLES.items()
        if variable.outcome == REFUSED and given.get(name, "").strip().lower() not in _OFF
    )


def notes_on_npu(given: Mapping[str, str]) -> tuple[str, ...]:
    """Of those that say what is so already."""
    return tuple(
        f"{name} is set to the behaviour that applies anyway: {variable.meaning}"
        for name, variable in VARIABLES.items()
        if variable.outcome == SO and given.get(name, "").strip().lower() not in _OFF
    )


def table() -> Iterator[str]:
    """Lines for docs/ascend.md."""
    yield "| variable | outcome on npu | |"
    yield "|---|---|---|"
    for name, variable in VARIABLES.items():
        yield f"| `{name}` | {variable.outcome} | {variable.meaning} |"
