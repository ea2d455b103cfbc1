"""Pictures from file to token: the answers of tiny models are those of transformers."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
)

from banyan import Engine
from tests.support.multimodal import RECIPES, qwen_features, tiny
from tests.system.serving import ROOT, serving

GREEDY = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
SMALL = ("--threads", "1", "--max-total-tokens", "4096", "--mm-per-request-timeout", "0")


def picture(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def processed(folder: Path, pictures: list[Image.Image]):
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    del settings["image_processor_type"]
    return Qwen2VLImageProcessorPil(**settings)(images=pictures, return_tensors="pt")


def of_transformers(model, folder: Path, text: str, pictures: list[Image.Image]):
    """Greedy output ids, and the length of the prompt."""
    found = processed(folder, pictures)
    counts = iter((found["image_grid_thw"].prod(1) // 4).tolist())
    pad, ids = model.config.image_token_id, []
    for id in PreTrainedTokenizerFast.from_pretrained(folder)(text)["input_ids"]:
        ids += [id] * (next(counts) if id == pad else 1)
    tokens = torch.tensor([ids])
    with torch.no_grad():
        output = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            pixel_values=found["pixel_values"],
            image_grid_thw=found["image_grid_thw"],
            mm_token_type_ids=(tokens == pad).int(),
            max_new_tokens=GREEDY["max_new_tokens"],
            do_sample=False,
            eos_token_id=None,
        )
    return output[0, len(ids) :].tolist(), len(ids)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_answers_about_pictures_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = tiny(family, tmp_path)
    first, second = picture(140, 100), picture(60, 60)
    pad = RECIPES[family].image
    text = f"Hello {pad} and {pad} what?"
    engine = Engine(
        str(tmp_path),
        engine_mode="inprocess",
        threads=1,
        max_total_tokens=4096,
        mm_per_request_timeout=0,
    )
    with engine:

        def ask(*pictures: Image.Image) -> tuple[list[int], int, int]:
            answer = engine.generate(text, GREEDY, image_data=list(pictures))
            meta = answer["meta_info"]
            return answer["output_ids"], meta["prompt_tokens"], meta["cached_tokens"]

        expected, length = of_transformers(model, tmp_path, text, [first, second])
        assert ask(first, second) == (expected, length, 0)
        again, _, cached = ask(first, second)
        assert again == expected
        assert cached > 0 or family == "qwen3_5"  # states are kept from 256 tokens on
        other, other_length = of_transformers(model, tmp_path, text, [second, first])
        found, _, cached = ask(second, first)
        assert found == other and other_length == length
        assert cached <= len("Hello ") + 1  # nothing of another picture
        ready = processed(tmp_path, [first, second])
        grids = ready["image_grid_thw"]
        patches = ready["pixel_values"].split(grids.prod(1).tolist())
        for kind, name, values in (
            ("processor_output", "pixel_values", patches),
            (
                "precomputed_embedding",
                "feature",
                [
                    qwen_features(model, p, tuple(g)).tolist()
                    for p, g in zip(patches, grids.tolist(), strict=True)
                ],
            ),
        ):
            given = [
                {"format": kind, name: value, "image_grid_thw": grid.tolist()}
                for value, grid in zip(values, grids, strict=True)
            ]
            assert engine.generate(text, GREEDY, image_data=given)["output_ids"] == expected, kind
        ids = PreTrainedTokenizerFast.from_pretrained(tmp_path)(text)["input_ids"]
        counts = iter((grids.prod(1) // 4).tolist())
        pad = model.config.image_token_id
        full = [id for each in ids for id in [each] * (next(counts) if each == pad else 1)]
        answer = engine.generate(None, GREEDY, input_ids=full, image_data=given)
        assert answer["output_ids"] == expected


def test_a_server_answers_the_example_and_counts_its_picture(tmp_path: Path) -> None:
    tiny("qwen3_vl", tmp_path / "model")
    words = ("--model-path", str(tmp_path / "model"), *SMALL)
    with serving(tmp_path / "log", *words) as server:
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "vision.py")],
            env={"BANYAN_URL": server.url, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.splitlines()[-1].endswith("prompt tokens")
        audio = {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}
        body = {"messages": [{"role": "user", "content": [audio]}]}
        refused = server.http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and "takes no sound" in refused.text
        assert server.http.get("/livez").status_code == 200
