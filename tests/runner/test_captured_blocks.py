"""Captured steps of models with experts and with latent attention, and what keeps steps from being
captured: ops that ask the device for numbers."""

import logging

import pytest
import torch

from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.model_config import ModelConfig
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from tests.runner.conftest import CPU, MAX_LENGTH, NUM_PAGES, SHAPES, Elsewhere, build_runner
from tests.runner.test_captured_forward import requests
from tests.support.runner_driver import PAGE, Driver

_SIZES = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
}
_LATENT = {
    "n_routed_experts": 5,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
}
MODELS = {
    "Qwen3Moe": {"num_key_value_heads": 2, "num_experts": 6, "head_dim": 8},
    "DeepseekV2": {"num_key_value_heads": 4, **_LATENT},
}


@pytest.fixture(scope="module", params=MODELS)
def block_model_config(request, tmp_path_factory) -> ModelConfig:
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{request.param}Config")(**_SIZES, **MODELS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    getattr(transformers, f"{request.param}ForCausalLM")(config).save_pretrained(folder)
    return read_model_config(str(folder))


def test_captured_steps_give_the_tokens_of_others(block_model_config):
    def outputs(platform: Elsewhere | None) -> list[list[int]]:
        mine = requests(3)
        Driver(build_runner(block_model_config, platform=platform)).run(mine)
        return [request.output for request in mine]

    platform = Elsewhere()
    captured = outputs(platform)
    assert platform.replays == 5
    assert captured == outputs(None)


def test_steps_whose_ops_wait_for_the_device_are_not_captured(block_model_config, caplog):
    ops = bind("cpu", CPU, torch.float32, frozenset(), block_model_config.head_dim, exact=True)
    build = Build(ops)
    layout = GroupLayout("full", 0, PAGE, NUM_PAGES)
    sizes = RunnerConfig(4, MAX_LENGTH, (layout,), 0, SHAPES)

    with caplog.at_level(logging.INFO):
        runner = ModelRunner(load_model(block_model_config, build), build, sizes, Elsewhere())

    assert runner.forward.how == "eager"
    attends = "" if block_model_config.latent is None else "latent_attention, "
    assert f"{attends}experts waits for the device" in caplog.text
