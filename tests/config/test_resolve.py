import logging
from dataclasses import replace
from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.config.env import Environment
from banyan.config.resolve import prepare, resolve
from banyan.config.schema import (
    Config,
    DeviceConfig,
    LoadConfig,
    ParallelConfig,
    ScheduleConfig,
    ServerConfig,
)
from banyan.model_config.model_config import QuantFacts
from banyan.model_config.quantization import form_of
from tests.support.checkpoints import LLAMA, folder
from tests.support.configs import MODEL_CONFIG, NOTHING
from tests.support.flags import config_of


def test_what_was_left_open_is_taken_from_the_model() -> None:
    model = resolve(Config(model=LoadConfig("demo")), MODEL_CONFIG, NOTHING).model
    assert (model.served_name, model.tokenizer_path) == ("demo", "/weights")
    assert (model.context_length, model.load_format) == (2048, "gguf")


def test_what_was_said_stays(tmp_path: Path) -> None:
    said = LoadConfig(
        served_name="x", tokenizer_path=str(tmp_path), context_length=100, load_format="dummy"
    )
    assert resolve(Config(model=said), MODEL_CONFIG, NOTHING).model == said


def test_resolving_twice_changes_nothing(tmp_path: Path) -> None:
    model_config = replace(MODEL_CONFIG, path=str(tmp_path))
    once = resolve(Config(), model_config, NOTHING)
    assert resolve(once, model_config, NOTHING) == once


def test_each_decision_is_logged_with_its_reason(heard: pytest.LogCaptureFixture) -> None:
    with heard.at_level(logging.DEBUG, "banyan"):
        resolve(Config(), MODEL_CONFIG, NOTHING)
    assert "set context-length=2048 because the model was trained for it" in heard.text


def test_a_context_beyond_the_model_s_needs_a_word_of_consent() -> None:
    config = Config(model=LoadConfig(context_length=4096))
    with pytest.raises(ConfigError, match="--context-length 4,096 .* 2,048"):
        resolve(config, MODEL_CONFIG, NOTHING)
    longer = resolve(config, MODEL_CONFIG, Environment(allow_longer_context=True))
    assert longer.model.context_length == 4096


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3 .* 4 attention heads"):
        resolve(Config(parallel=ParallelConfig(tp=3)), MODEL_CONFIG, NOTHING)


def test_the_numbers_of_ranks_that_fit_are_listed() -> None:
    model_config = replace(MODEL_CONFIG, num_heads=9, num_kv_heads=3, intermediate_size=1536)
    with pytest.raises(ConfigError, match="Choose one of: 1, 3$"):
        resolve(Config(parallel=ParallelConfig(tp=2)), model_config, NOTHING)
    assert resolve(Config(parallel=ParallelConfig(tp=3)), model_config, NOTHING)


def test_a_chunk_of_nothing_is_no_chunking() -> None:
    config = resolve(Config(schedule=ScheduleConfig(chunk_tokens=0)), MODEL_CONFIG, NOTHING)
    assert config.schedule.chunk_tokens == -1


@pytest.mark.parametrize(
    ("wanted", "facts", "becomes"),
    [
        ("q4_0", {"dtype": "bfloat16"}, "q4_0"),
        ("gguf", {"format": "gguf", "dtype": "q4_1"}, ""),
        ("unquant", {"format": "gguf", "dtype": "q4_1"}, ""),
        ("fp8", {"dtype": "bfloat16", "quant": QuantFacts("fp8", "{}")}, ""),
        ("fp8", {"dtype": "bfloat16"}, "weights are bfloat16, and cannot be converted to fp8"),
        ("mxfp8", {"dtype": "bfloat16", "quant": QuantFacts("fp8", "{}")}, ""),
        ("moe_wna16", {"dtype": "float16", "quant": QuantFacts("awq", "{}")}, ""),
        ("w8a8_int8", {"quant": QuantFacts("compressed-tensors", "{}")}, ""),
        ("w8a8_fp8", {"quant": QuantFacts("compressed-tensors", "{}")}, ""),
        ("petit_nvfp4", {"quant": QuantFacts("modelopt", "{}")}, ""),
        ("w4afp8", {"quant": QuantFacts("fp8", "{}")}, "its weights are fp8"),
        ("gptq_marlin", {"dtype": "float16", "quant": QuantFacts("gptq", "{}")}, ""),
        ("w8a8_int8", {"dtype": "bfloat16", "quant": QuantFacts("modelslim", "{}")}, ""),
        ("gptq", {"dtype": "float16", "quant": QuantFacts("awq", "{}")}, "its weights are awq"),
        ("int8", {"dtype": "float16", "quant": QuantFacts("awq", "{}")}, "are awq already"),
        ("int8", {"dtype": "float16", "quant": QuantFacts("fp8", "{}")}, "int8"),
        ("gguf", {"format": "safetensors"}, "is safetensors"),
        ("int8", {"format": "gguf", "dtype": "q4_1"}, "are q4_1 already"),
    ],
)
def test_only_float_weights_are_rounded(
    wanted: str, facts: dict[str, object], becomes: str
) -> None:
    config = Config(model=LoadConfig(source="m", quantization=wanted))
    model_config = replace(MODEL_CONFIG, **facts)
    if " " not in becomes:
        assert resolve(config, model_config, Environment()).model.quantization == becomes
        return
    with pytest.raises(ConfigError, match=becomes):
        resolve(config, model_config, Environment())


@pytest.mark.parametrize(
    ("facts", "becomes"),
    [
        ({"dtype": "bfloat16"}, "fp8"),
        ({"dtype": "bfloat16", "quant": QuantFacts("fp8", "{}")}, ""),
        ({"dtype": "bfloat16", "quant": QuantFacts("modelopt", "{}")}, "weights are modelopt"),
        ({"format": "gguf", "dtype": "q4_1"}, "weights are q4_1, and cannot be converted"),
    ],
)
def test_float_weights_are_rounded_to_fp8_on_cuda(facts: dict[str, object], becomes: str) -> None:
    config = Config(
        model=LoadConfig(source="m", quantization="fp8"), device=DeviceConfig(name="cuda")
    )
    if " " not in becomes:
        resolved = resolve(config, replace(MODEL_CONFIG, **facts), Environment())
        assert resolved.model.quantization == becomes
        return
    with pytest.raises(ConfigError, match=becomes):
        resolve(config, replace(MODEL_CONFIG, **facts), Environment())


@pytest.mark.parametrize(("wanted", "lines"), [("fp8", 0), ("w8a8_fp8", 1)])
def test_a_name_that_is_not_the_checkpoints_own_is_reported(
    wanted: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(model=LoadConfig(source="m", quantization=wanted))
    with caplog.at_level("INFO", "banyan"):
        resolve(config, replace(MODEL_CONFIG, quant=QuantFacts("fp8", "{}")), Environment())
    assert caplog.text.count(f"--quantization {wanted}: reading the weights as fp8") == lines


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("w8a8_int8", "w8a8_int8"),
        ("w8a8_fp8", "fp8"),
        ("mxfp8", "fp8"),
        ("modelopt_fp4", "modelopt"),
        ("compressed_tensors", "compressed-tensors"),
        ("intel/auto-round", "auto-round"),
        ("magic", "magic"),
    ],
)
def test_a_checkpoint_may_call_its_form_otherwise(name: str, form: str) -> None:
    assert form_of(name) == form


def test_a_tokenizer_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tokenizer-path 'gone'"):
        resolve(Config(model=LoadConfig(tokenizer_path="gone")), MODEL_CONFIG, NOTHING)


def test_preparing_finds_the_model_reads_its_card_and_resolves(tmp_path: Path) -> None:
    path = folder(tmp_path, LLAMA)
    config, model_config, _ = prepare(config_of("--model-path", path), NOTHING)
    assert (config.model.path, config.model.served_name) == (path, path)
    assert model_config.num_layers == 2 and config.model.load_format == "safetensors"


def test_overrides_reach_the_card_of_the_model(tmp_path: Path) -> None:
    path = folder(tmp_path, LLAMA)
    _, model_config, _ = prepare(
        config_of(path, "--json-model-override-args", '{"rope_theta": 777.0}'), NOTHING
    )
    assert model_config.rope.theta == 777.0


def test_only_the_demo_left_to_itself_samples_as_its_makers_advise() -> None:
    advised = resolve(Config(), MODEL_CONFIG, NOTHING).server.preferred_sampling
    assert advised == {"temperature": 0.2, "top_p": 0.9}
    other = Config(model=LoadConfig(source="someone/else"))
    assert resolve(other, MODEL_CONFIG, NOTHING).server.preferred_sampling == {}
    chosen = Config(server=ServerConfig(preferred_sampling={"top_k": 5}))
    assert resolve(chosen, MODEL_CONFIG, NOTHING).server.preferred_sampling == {"top_k": 5}
    openai = Config(server=ServerConfig(sampling_defaults="openai"))
    assert resolve(openai, MODEL_CONFIG, NOTHING).server.preferred_sampling == {}


def test_only_the_demo_left_to_itself_has_a_bound_on_its_answers() -> None:
    assert resolve(Config(), MODEL_CONFIG, NOTHING).server.chat_tokens == 1024
    other = Config(model=LoadConfig(source="someone/else"))
    assert resolve(other, MODEL_CONFIG, NOTHING).server.chat_tokens == 0
    chosen = Config(server=ServerConfig(preferred_sampling={"max_new_tokens": None}))
    assert resolve(chosen, MODEL_CONFIG, NOTHING).server.chat_tokens == 0


def test_only_the_demo_left_to_itself_is_asked_without_a_system_message() -> None:
    assert resolve(Config(), MODEL_CONFIG, NOTHING).server.chat_template == "chatml"
    other = Config(model=LoadConfig(source="someone/else"))
    assert resolve(other, MODEL_CONFIG, NOTHING).server.chat_template == ""
    chosen = Config(server=ServerConfig(chat_template="llama-3"))
    assert resolve(chosen, MODEL_CONFIG, NOTHING).server.chat_template == "llama-3"
