"""The file of scales for cached keys and values: what it says, and what is refused."""

import json
from dataclasses import replace

import pytest

from banyan.base.errors import ConfigError
from banyan.config.env import Environment
from banyan.config.schema import CacheConfig, Config, LoadConfig, ParallelConfig
from banyan.model_config.model_config import LatentFacts, ModelConfig
from banyan.model_config.quantization import check_kv_scales, read_kv_scales

MODEL_CONFIG = ModelConfig(
    *("", "safetensors", "LlamaForCausalLM", "llama", 97, 48, 64, 2, 6, 2, 8, 64),
)
KEPT = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5, "1": 2}}}


def config_of(tmp_path, content, dtype="fp8_e4m3", tp=1, **model) -> Config:
    path = tmp_path / "scales.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return Config(
        model=LoadConfig(**model),
        cache=CacheConfig(dtype=dtype, scales=str(path)),
        parallel=ParallelConfig(tp=tp),
    )


def test_layers_have_the_scales_of_their_rank(tmp_path):
    by_rank = {"0": {"0": 0.5, "1": 2}, "1": {"0": 4.0, "1": 0.25}}
    content = {"model_type": "llama", "kv_cache": {**KEPT, "scaling_factor": by_rank}}
    config = config_of(tmp_path, content, tp=2)

    assert check_kv_scales(config, MODEL_CONFIG, Environment()) == config
    assert [read_kv_scales(config, MODEL_CONFIG, rank) for rank in (0, 1)] == [
        (0.5, 2.0),
        (4.0, 0.25),
    ]


def test_other_number_types_have_none(tmp_path):
    config = config_of(tmp_path, "no JSON", dtype="int8")

    assert check_kv_scales(config, MODEL_CONFIG, Environment()) == config
    assert read_kv_scales(config, MODEL_CONFIG, 0) == ()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "quantization-param-path.*is not JSON"),
        ({}, "kv_cache must be a mapping"),
        ({"kv_cache": KEPT, "model_type": "qwen2"}, "model_type must be llama; got 'qwen2'"),
        ({"kv_cache": {**KEPT, "dtype": "float8_e5m2"}}, "dtype must be float8_e4m3fn"),
        ({"kv_cache": {**KEPT, "scaling_factor": {"1": {}}}}, "a mapping that has rank 0"),
        (
            {"kv_cache": {**KEPT, "scaling_factor": {"0": {"0": 1}}}},
            "1 must be a number",
        ),
        ({"kv_cache": {**KEPT, "scaling_factor": {"0": {"0": 0, "1": 1}}}}, "0 must be in"),
    ],
)
def test_a_file_that_cannot_serve_is_refused(content, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        check_kv_scales(config_of(tmp_path, content), MODEL_CONFIG, Environment())


def test_a_rank_without_scales_is_named(tmp_path):
    with pytest.raises(ConfigError, match="a mapping that has rank 1"):
        check_kv_scales(config_of(tmp_path, {"kv_cache": KEPT}, tp=2), MODEL_CONFIG, Environment())


def test_latent_attention_and_foreign_models_take_none(tmp_path):
    latent = replace(MODEL_CONFIG, latent=LatentFacts(0, 4, 4, 2, 4))
    with pytest.raises(ConfigError, match="latent attention keeps no keys"):
        check_kv_scales(config_of(tmp_path, {}), latent, Environment())
    foreign = config_of(tmp_path, {}, implementation="transformers")
    with pytest.raises(ConfigError, match="--model-impl transformers keeps no keys"):
        check_kv_scales(foreign, MODEL_CONFIG, Environment())
