"""Models with layers that draft, and requests that are given up."""

import os
import shutil
from pathlib import Path

import pytest

from banyan.llm import Engine
from tests.models.drafting import tiny_eagle, tiny_eagle3, tiny_mtp
from tests.support.drafts import LONG, REPEATS, answers, start

ALL = os.environ.get("DRAFTS") == "all"

SLOW = (pytest.mark.slow, pytest.mark.skipif(not ALL, reason="make test-drafts runs it"))

TREE = {
    "speculative_num_steps": 4,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 8,
}
_WORDS = {"vocab_size": 512, "max_position_embeddings": 2048}


def ahead(model: Path, **flags: object) -> Engine:
    named: dict[str, object] = {"speculative_algorithm": "NEXTN", "disable_adaptive_drafts": True}
    if (model / "eagle").exists():
        facts = (model / "eagle" / "config.json").read_text()
        named["speculative_algorithm"] = "EAGLE3" if "draft_vocab_size" in facts else "EAGLE"
        named["speculative_draft_model_path"] = str(model / "eagle")
    return start(model, is_drafting=False, **(named | flags))


def with_words(variant: str, folder: Path, words: Path, **sizes: int) -> Path:
    """A model with a layer that drafts, or with a model beside it that was made for it, and the
    tokenizer of another one."""
    if variant == "mistral":
        tiny_eagle(variant, folder, folder / "eagle", **_WORDS, **sizes)
    elif variant == "qwen3":
        sizes |= {"head_dim": 16, "known": 450}
        tiny_eagle3(variant, folder, folder / "eagle", **_WORDS, **sizes)
    else:
        tiny_mtp(variant, folder, **_WORDS, **sizes)
    for file in words.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def given_up(engine: Engine) -> None:
    """An answer that is given up leaves nothing."""
    sampling = LONG | {"max_new_tokens": 300}
    stream = engine.generate(prompt=REPEATS, sampling_params=sampling, stream=True)
    next(iter(stream))
    stream.close()
    assert answers(engine, prompt="The banyan grows")[0]["output_ids"]
    assert engine.stats().leaked == 0


FEW = {"page_size": 16, "max_total_tokens": 512, "max_running_requests": 6}
