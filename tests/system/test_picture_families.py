"""Each family's pictures from file to token: the answers of tiny models are those of transformers.

Other than the Qwen-VL models, whose pictures `test_pictures.py` follows through caches and servers.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer

from banyan import Engine
from tests.support.multimodal import RECIPES, tiny

STEPS = 8
GREEDY = {"max_new_tokens": STEPS, "temperature": 0, "ignore_eos": True}
SIZES = ((90, 70), (150, 40))

Inputs = dict[str, Any]
Prepared = tuple[list[str], Inputs]
"""What the processor writes for each picture, and the inputs of the model."""


def picture(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def _processed(name: str, settings: Mapping[str, Any], pictures: object, **more: Any) -> Any:
    known = ("size", "crop_size", "max_image_size", "patch_size", "image_mean", "image_std")
    own = {key: settings[key] for key in known if key in settings} | more
    found = getattr(transformers, f"{name}ImageProcessorPil")(**own)
    return found(pictures, return_tensors="pt")


def _by_grid(name: str, token: str) -> Callable[[Mapping[str, Any], list[Image.Image]], Prepared]:
    def prepare(settings: Mapping[str, Any], pictures: list[Image.Image]) -> Prepared:
        found = _processed(name, settings, pictures, merge_size=2)
        grid = found["image_grid_thw"]
        texts = [token * (int(each.prod()) // 4) for each in grid]
        return texts, {"pixel_values": found["pixel_values"], "image_grid_thw": grid}

    return prepare


def _llava(settings: Mapping[str, Any], pictures: list[Image.Image]) -> Prepared:
    found = _processed("CLIP", settings, pictures)
    return ["<image>" * 36] * len(pictures), {"pixel_values": found["pixel_values"]}


def _llava_next(settings: Mapping[str, Any], pictures: list[Image.Image]) -> Prepared:
    pinpoints = settings["image_grid_pinpoints"]
    found = _processed("LlavaNext", settings, pictures, image_grid_pinpoints=pinpoints)
    processor = transformers.models.llava_next.processing_llava_next.LlavaNextProcessor
    counter = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=pinpoints),
        patch_size=14,
        num_additional_image_tokens=0,
    )
    counter._get_unpadded_features = partial(processor._get_unpadded_features, counter)
    counts = [
        processor._get_number_of_features(counter, each.height, each.width, 84, 84)
        for each in pictures
    ]
    sizes = {"image_sizes": torch.as_tensor(found["image_sizes"])}
    return ["<image>" * count for count in counts], {"pixel_values": found["pixel_values"], **sizes}


def _gemma3(settings: Mapping[str, Any], pictures: list[Image.Image]) -> Prepared:
    found = _processed("Gemma3", settings, pictures, resample=Image.Resampling.BILINEAR)
    text = f"<start_of_image>{'<image_soft_token>' * 9}<end_of_image>"
    return [text] * len(pictures), {"pixel_values": found["pixel_values"]}


def _internvl(settings: Mapping[str, Any], pictures: list[Image.Image]) -> Prepared:
    tiles = {"crop_to_patches": True, "min_patches": 1, "max_patches": 4}
    found = _processed("GotOcr2", settings, pictures, **tiles)
    counts = [int(count) for count in found["num_patches"]]
    assert counts == [1, 5]  # the second one has tiles
    texts = [f"<img>{'<IMG_CONTEXT>' * 9 * count}</img>" for count in counts]
    return texts, {"pixel_values": found["pixel_values"]}


def _by_rows(merge: int) -> Callable[[Mapping[str, Any], list[Image.Image]], Prepared]:
    def prepare(settings: Mapping[str, Any], pictures: list[Image.Image]) -> Prepared:
        found = _processed("Pixtral", settings, pictures, patch_size=14 * merge)
        sizes = torch.as_tensor(found["image_sizes"])
        texts = []
        for height, width in (sizes // (14 * merge)).tolist():
            row = "[IMG]" * width
            texts.append(f"{row}[IMG_BREAK]" * (height - 1) + f"{row}[IMG_END]")
        return texts, {"pixel_values": found["pixel_values"], "image_sizes": sizes}

    return prepare


def _smolvlm(settings: Mapping[str, Any], pictures: list[Image.Image]) -> Prepared:
    name, nested = "SmolVLM", [[each] for each in pictures]
    own = {k: v for k, v in settings.items() if k != "image_processor_type"}
    processor = transformers.SmolVLMImageProcessorPil(**own)
    found = processor(nested, return_tensors="pt", return_row_col_info=True)
    fake, texts = "<fake_token_around_image>", []
    for rows, columns in zip(found["rows"], found["cols"], strict=True):
        parts = [
            "".join(
                f"{fake}<row_{row}_col_{column}>{'<image>' * 4}"
                for column in range(1, columns[0] + 1)
            )
            + "\n"
            for row in range(1, rows[0] + 1)
        ]
        assert parts, name
        texts.append("".join(parts) + f"\n{fake}<global-img>{'<image>' * 4}{fake}")
    masks = {"pixel_attention_mask": found["pixel_attention_mask"]}
    return texts, {"pixel_values": found["pixel_values"], **masks}


FAMILIES: Mapping[str, tuple[str, Callable[[Mapping[str, Any], list[Image.Image]], Prepared]]] = {
    "glm4v": ("<|image|>", _by_grid("Glm4v", "<|image|>")),
    "paddleocr_vl": (
        "<|IMAGE_PLACEHOLDER|>",
        _by_grid("PaddleOCRVL", "<|IMAGE_PLACEHOLDER|>"),
    ),
    "glm4v_moe": ("<|image|>", _by_grid("Glm4v", "<|image|>")),
    "llava": ("<image>", _llava),
    "llava_next": ("<image>", _llava_next),
    "gemma3": ("<start_of_image>", _gemma3),
    "internvl": ("<IMG_CONTEXT>", _internvl),
    "pixtral": ("[IMG]", _by_rows(1)),
    "mistral3": ("[IMG]", _by_rows(2)),
    "smolvlm": ("<image>", _smolvlm),
}
"""Family -> its placeholder, and what transformers' processor makes of pictures."""


def of_transformers(family: str, model: Any, folder: Path, pictures: list[Image.Image]) -> Prepared:
    """Greedy output ids, and the length of the prompt."""
    pad, prepare = FAMILIES[family]
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    texts, inputs = prepare(settings, pictures)
    prompt = question(family)
    for text in texts:
        prompt = prompt.replace(pad, "\0", 1).replace("\0", text.replace(pad, "\1"), 1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(prompt.replace("\1", pad), add_special_tokens=False).ids
    length, chosen = len(ids), tokenizer.token_to_id(pad)
    mutual = tokenizer.token_to_id("<image_soft_token>")
    with torch.no_grad():
        for _ in range(STEPS):
            tokens = torch.tensor([ids])
            if "image_grid_thw" in inputs:
                inputs["mm_token_type_ids"] = (tokens == chosen).int()
            if mutual is not None:
                inputs["token_type_ids"] = (tokens == mutual).int()
            logits = model(input_ids=tokens, use_cache=False, **inputs).logits
            ids = [*ids, int(logits[0, -1].argmax())]
    return ids[length:], length


def question(family: str) -> str:
    image = RECIPES[family].image
    return f"Hello {image} and {image} what?"


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_about_pictures_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = tiny(family, tmp_path)
    pictures = [picture(*size) for size in SIZES]
    expected, length = of_transformers(family, model, tmp_path, pictures)

    exact = {"cpu_activations": "fp32", "max_total_tokens": 4096, "threads": 1}
    with Engine(str(tmp_path), engine_mode="inprocess", **exact) as engine:
        answer = engine.generate(question(family), GREEDY, image_data=pictures)

    assert answer["output_ids"] == expected
    assert answer["meta_info"]["prompt_tokens"] == length
