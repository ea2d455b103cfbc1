"""The recipes of the documents: flags and variables of each role, in the documents' own spelling.

They name no machines; `plan.py` fills in addresses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from banyan.ascend.launch.facts import LaunchModel, known_model

PREFILL, DECODE, SERVE = "prefill", "decode", "serve"


@dataclass(frozen=True)
class Role:
    """What all nodes of one role have in common.

    Attributes:
        dies: devices of one instance; 0 = all of the nodes that are named.
        flags: of the command line, without model, addresses and nodes.
    """

    dies: int
    port: int
    flags: str
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Recipe:
    """
    Attributes:
        name: a short one, for files and services.
        source: the document that it is from.
        bootstrap_port, meeting_port, store_port: of the prefill nodes; the second of every role.
    """

    name: str
    source: str
    roles: Mapping[str, Role]
    bootstrap_port: int = 8998
    meeting_port: int = 6688
    store_port: int = 6670
    router_port: int = 5000


_SEGMENTS = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
_GUIDE = {**_SEGMENTS, "STREAMS_PER_DEVICE": "32", "SGLANG_SET_CPU_AFFINITY": "1"}
_GUIDE_FLAGS = (
    "--trust-remote-code --device npu --attention-backend ascend --page-size 128 "
    "--quantization modelslim --tp-size 32 --moe-a2a-backend deepep --moe-dense-tp-size 1 "
    "--tokenizer-worker-num 4 --load-balance-method round_robin "
    "--speculative-algorithm NEXTN --speculative-eagle-topk 1 "
)
_GUIDE_PREFILL = (
    "--speculative-num-steps 1 --speculative-num-draft-tokens 2 --deepep-mode normal "
    "--enable-nsa-prefill-context-parallel --nsa-prefill-cp-mode in-seq-split --attn-cp-size 32 "
    "--chunked-prefill-size -1 --max-prefill-tokens 68000 --max-running-requests 1 "
    "--disable-radix-cache --disable-cuda-graph --mem-fraction-static 0.73"
)
_GUIDE_DECODE = (
    "--speculative-num-steps 3 --speculative-num-draft-tokens 4 --deepep-mode low_latency "
    "--dp-size 8 --ep-size 32 --enable-dp-attention --enable-dp-lm-head --cuda-graph-max-bs 4 "
    "--mem-fraction-static 0.79"
)
GUIDE = Recipe(
    "deepseek-v3.2",
    "parameter guide",
    {
        PREFILL: Role(
            32,
            8000,
            _GUIDE_FLAGS + _GUIDE_PREFILL,
            {
                **_GUIDE,
                "HCCL_BUFFSIZE": "1200",
                "TASK_QUEUE_ENABLE": "2",
                "DEEP_NORMAL_MODE_USE_INT8_QUANT": "1",
                "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "0",
                "SGLANG_USE_AG_AFTER_QLORA": "1",
            },
        ),
        DECODE: Role(
            32,
            8001,
            _GUIDE_FLAGS + _GUIDE_DECODE,
            {
                **_GUIDE,
                "HCCL_BUFFSIZE": "400",
                "TASK_QUEUE_ENABLE": "0",
                "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "8",
                "SGLANG_SCHEDULER_SKIP_ALL_GATHER": "1",
                "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1",
                "SGLANG_ENABLE_SPEC_V2": "1",
            },
        ),
    },
)

_PAGE_FLAGS = (
    "--trust-remote-code --device npu --attention-backend ascend --mem-fraction-static 0.8 "
    "--quantization modelslim --tp-size 16 --dp-size 1"
)
INSTALL_PAGE = Recipe(
    "deepseek-r1",
    "install page",
    {
        PREFILL: Role(16, 8000, _PAGE_FLAGS, _SEGMENTS),
        DECODE: Role(
            16,
            8001,
            _PAGE_FLAGS + " --moe-a2a-backend deepep --deepep-mode low_latency --ep-size 16",
            {
                **_SEGMENTS,
                "HCCL_BUFFSIZE": "200",
                "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "24",
                "SGLANG_NPU_USE_MLAPO": "1",
            },
        ),
    },
    bootstrap_port=6657,
)

PLAIN = Recipe(
    "plain",
    "install page",
    {SERVE: Role(0, 30000, "--trust-remote-code --device npu --attention-backend ascend")},
)
"""For every other model: one server over all devices that are named."""


def recipe_of(source: str) -> tuple[Recipe, LaunchModel | None]:
    """The recipe of a model, by its name, and its facts."""
    model = known_model(source)
    if model is None:
        return PLAIN, None
    return (GUIDE if model.is_sparse else INSTALL_PAGE), model
