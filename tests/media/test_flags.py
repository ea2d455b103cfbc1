"""Which models take pictures: --enable-multimodal and --language-model-only."""

from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.config.resolve import find_model
from banyan.config.schema import Config
from tests.support.checkpoints import LLAMA, folder

NOTHING = Environment()
QWEN2_VL = LLAMA | {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
}


def config(path: Path, *words: str) -> Config:
    return parse(["--model-path", str(path), *words], NOTHING)


def test_a_model_without_a_tower_cannot_be_multimodal(tmp_path: Path) -> None:
    folder(tmp_path, LLAMA)
    assert find_model(config(tmp_path), NOTHING)[1].media is None
    with pytest.raises(ConfigError, match="--enable-multimodal.*has no tower"):
        find_model(config(tmp_path, "--enable-multimodal"), NOTHING)


def test_the_text_model_is_served_alone(tmp_path: Path) -> None:
    folder(tmp_path, QWEN2_VL)
    assert find_model(config(tmp_path, "--enable-multimodal"), NOTHING)[1].media is not None
    alone = config(tmp_path, "--language-model-only")
    assert find_model(alone, NOTHING)[1].media is None
    with pytest.raises(ConfigError, match="has no tower"):
        both = config(tmp_path, "--language-model-only", "--enable-multimodal")
        find_model(both, NOTHING)
