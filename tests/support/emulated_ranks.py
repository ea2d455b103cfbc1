"""Engines of several ranks on the emulated NPU."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import banyan
from tests.support.emulated import LATENT

IS_WHOLE = os.environ.get("NPU_CASES") == "all"

IN_ALL = pytest.mark.skipif(not IS_WHOLE, reason="NPU_CASES is not all")

EAGER = {"disable_cuda_graph": True}

CAPTURED = {"cuda_graph_bs": [1, 2, 4]}

LENGTHS = (150, 40, 21, 5)

TOKENS = (4, 8, 12, 16)


@contextlib.contextmanager
def start(model: Path, **flags: object) -> Iterator[banyan.Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BANYAN_NPU", "tests.ascend.emulation")
        patch.setenv("BANYAN_NPU_CHECKS", "1")
        with banyan.Engine(
            str(model),
            **{"device": "npu", "max_total_tokens": 2048, "skip_tokenizer_init": True}
            | {"page_size": 128, "threads": 1, "dtype": "float16", "max_running_requests": 4}
            | flags,
        ) as engine:
            yield engine


def answers(engine: banyan.Engine) -> list[dict]:
    ids = [[(7 * i * i + 3 * i + n) % 97 for i in range(n)] for n in LENGTHS]
    params = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in TOKENS]
    asked = {"return_logprob": True, "top_logprobs_num": 2}
    return engine.generate(input_ids=ids, sampling_params=params, **asked)


JOINED = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}

SIZES = {
    "qwen3": {"head_dim": 128},
    "qwen3 moe": {"head_dim": 16, "num_experts": 8},
    "gpt-oss": {"head_dim": 64, "num_local_experts": 4},
    "deepseek v3": LATENT,
    "deepseek v3.2": LATENT | {"index_head_dim": 128},
}
WIDE = {"hidden_size": 1024, "num_hidden_layers": 2, "weights": 0.05}

SIZES |= {f"{name} wide": size | WIDE for name, size in SIZES.items()}
"""Rows of as many numbers as exchanges of a fixed size take."""
