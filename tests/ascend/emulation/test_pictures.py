"""Pictures on the emulated NPU: towers, feature rows, and tokens that see each other, against the
CPU."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import banyan
from tests.support.emulated import compare, start
from tests.support.multimodal import RECIPES, tiny

TOKENS = 8
NEAR = 0.05


def answers(engine: banyan.Engine, image: str) -> list[dict]:
    rng = np.random.default_rng(7)
    pictures = [
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        for width, height in ((90, 70), (150, 60))
    ]
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    asked = {"return_logprob": True, "top_logprobs_num": 2}
    return [
        engine.generate(f"Hello {image * count} what?", params, image_data=given, **asked)
        for count, given in ((1, pictures[:1]), (2, pictures), (2, pictures[::-1]))
    ]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_a_picture_means_what_it_means_on_the_cpu(npu, tmp_path: Path, family: str) -> None:
    tiny(family, tmp_path)
    flags = {"skip_tokenizer_init": False, "mm_per_request_timeout": 0}
    image = RECIPES[family].image
    with start(tmp_path, "cpu", dtype="float32", cpu_activations="fp32", **flags) as engine:
        wanted = answers(engine, image)
    with start(tmp_path, "npu", dtype="float16", **flags) as engine:
        assert compare(answers(engine, image), wanted, NEAR) >= TOKENS
