"""Engines on the emulated NPU, and how near their answers are to those of the CPU."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import banyan

NEAR = 0.02
"""How far apart two log-probabilities may be; the best must be twice as far from the second."""

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}

CAPTURED = {
    "qwen3": {"head_dim": 128},
    "gemma3": {"head_dim": 128},
    "gpt-oss": {"head_dim": 64},
    "qwen3 moe": {"head_dim": 16},
    "deepseek v2": LATENT,
    "deepseek v3.2": LATENT | {"index_head_dim": 128},
}
"""Variants whose decode steps are captured, with what makes them fit the operators."""

IS_WHOLE = os.environ.get("NPU_CASES") == "all"

IN_ALL = pytest.mark.skipif(not IS_WHOLE, reason="NPU_CASES is not all")

ROOM = {"max_position_embeddings": 256}


@contextlib.contextmanager
def start(model: Path, device: str, **flags: object) -> Iterator[banyan.Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BANYAN_NPU", "tests.ascend.emulation")
        patch.setenv("BANYAN_NPU_CHECKS", "1")
        with banyan.Engine(
            str(model),
            **{"device": device, "max_total_tokens": 2048, "skip_tokenizer_init": True}
            | {"engine_mode": "inprocess", "page_size": 128, "threads": 1}
            | flags,
        ) as engine:
            yield engine


def compare(mine: list[dict], theirs: list[dict], near: float = NEAR) -> int:
    """Hold answers against those of the CPU; returns how many tokens were compared."""
    compared = 0
    for got, wanted in zip(mine, theirs, strict=True):
        pairs = wanted["meta_info"]["output_top_logprobs"]
        unclear = (at for at, (best, next) in enumerate(pairs) if best[0] - next[0] < 2 * near)
        count = next(unclear, len(pairs))
        assert got["output_ids"][:count] == wanted["output_ids"][:count]
        logprobs = (found["meta_info"]["output_token_logprobs"] for found in (got, wanted))
        for (a, *_), (b, *_) in list(zip(*logprobs, strict=True))[:count]:
            assert abs(a - b) < near
        compared += count
    return compared
