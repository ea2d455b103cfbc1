"""How multimodal checkpoints describe pictures: sizes, bounds, placeholders and rotary axes."""

import pytest
import torch
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLConfig, Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextConfig,
    Qwen3VLTextRotaryEmbedding,
)

from banyan.base.errors import ModelError
from banyan.model_config.checkpoint import read_model_config
from tests.support.checkpoints import LLAMA, folder

_VISION = {"depth": 4, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
_QWEN3_VL: dict[str, object] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 500,
    "video_token_id": 501,
    "text_config": LLAMA
    | {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "vision_config": _VISION
    | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2], "intermediate_size": 64},
}
_QWEN2_VL = LLAMA | {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
}


def _media(path, config, **files):
    media = read_model_config(folder(path, config, **files)).media
    assert media is not None
    return media


def test_the_first_qwen_vl_models_bound_pixels_by_their_own_keys(tmp_path):
    bounds = {"min_pixels": 3136, "max_pixels": 12845056, "image_mean": [0.25, 0.5, 0.75]}

    media = _media(tmp_path, _QWEN2_VL, preprocessor_config=bounds)

    assert (media.settings["min_pixels"], media.settings["max_pixels"]) == (3136, 12845056)
    assert media.tower.mean == (0.25, 0.5, 0.75)
    assert (media.tower.width, media.tower.inner, media.tower.out) == (32, 128, 64)
    assert (media.image_token, media.video_token) == (500, 501)


def test_both_processors_in_one_file_are_read_as_parts(tmp_path):
    parts = {
        "image_processor": {"size": {"shortest_edge": 4096, "longest_edge": 65536}},
        "video_processor": {"size": {"shortest_edge": 8192, "longest_edge": 131072}, "fps": 4},
    }

    media = _media(tmp_path, _QWEN3_VL, processor_config=parts)

    assert (media.settings["min_pixels"], media.settings["max_pixels"]) == (4096, 65536)
    assert (media.video["min_pixels"], media.video["max_pixels"]) == (8192, 131072)
    assert media.video["fps"] == 4.0
    assert media.tower.feature_width == 3 * 64


@pytest.mark.parametrize(
    ("config", "rotary"),
    [
        (
            _QWEN2_VL,
            lambda: Qwen2VLRotaryEmbedding(
                Qwen2VLConfig(
                    text_config=LLAMA
                    | {
                        "rope_parameters": {
                            "rope_type": "default",
                            "rope_theta": 5e5,
                            "mrope_section": [2, 3, 3],
                        }
                    }
                ).text_config
            ),
        ),
        (
            _QWEN3_VL,
            lambda: Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(**_QWEN3_VL["text_config"])),
        ),
    ],
)
def test_each_rotary_pair_follows_the_axis_that_transformers_gives_it(config, rotary, tmp_path):
    embedding = rotary()
    turns = torch.tensor([3.0, 5.0, 7.0])

    cos, _ = embedding(torch.ones(1), turns.view(3, 1, 1))

    axes = torch.tensor(_media(tmp_path, config).axes)
    expected = (turns[axes] * embedding.inv_freq).cos()
    torch.testing.assert_close(cos.flatten()[: len(axes)], expected)


def test_a_text_model_alone_takes_no_pictures(tmp_path):
    path = folder(tmp_path, _QWEN3_VL)

    assert read_model_config(path, with_media=False).media is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("depth", 0),
        ("depth", 2**31),
        ("hidden_size", 2**63),
        ("num_heads", 3),
        ("out_hidden_size", 32),
        ("num_position_embeddings", 63),
        ("deepstack_visual_indexes", [4]),
        ("patch_size", -1),
    ],
)
def test_sizes_that_make_no_tower_are_an_error_that_names_the_key(key, value, tmp_path):
    vision = {**_QWEN3_VL["vision_config"], key: value}

    with pytest.raises(ModelError, match=key if key != "num_heads" else "3 heads"):
        read_model_config(folder(tmp_path, _QWEN3_VL | {"vision_config": vision}))


def test_bounds_in_the_wrong_order_are_an_error(tmp_path):
    bounds = {"min_pixels": 4096, "max_pixels": 1024}

    with pytest.raises(ModelError, match="min_pixels.*--language-model-only"):
        read_model_config(folder(tmp_path, _QWEN2_VL, preprocessor_config=bounds))


def test_a_standard_deviation_of_zero_is_an_error(tmp_path):
    with pytest.raises(ModelError, match="image_std.*--language-model-only"):
        _media(tmp_path, _QWEN2_VL, preprocessor_config={"image_std": [0.5, 0, 0.5]})
