"""What layers with a state do not go with is refused by name, at the start."""

import logging
from dataclasses import replace

import pytest

from banyan.base.errors import ConfigError
from banyan.config.env import Environment
from banyan.config.resolve import resolve
from banyan.config.rules.cache import check_states
from banyan.model_config.model_config import FULL, STATE, ModelConfig, StateFacts
from tests.support.flags import config_of

PLAIN = ModelConfig(
    path="model",
    format="safetensors",
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    context_length=2048,
)
HYBRID = replace(PLAIN, layer_kinds=(STATE, FULL), state=StateFacts("conv", 3))
STORE = "--enable-hierarchical-cache --hicache-storage-backend file"


def checked(line: str, model_config: ModelConfig) -> None:
    resolve(config_of("--model-path", "model", *line.split()), model_config, Environment())


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (
            "--speculative-algorithm NGRAM --speculative-ngram-min-bfs-breadth 2",
            "--speculative-ngram-min-bfs-breadth 2",
        ),
        (STORE, "--hicache-storage-backend file"),
        ("--dp 2 --tp 2 --enable-dp-attention", "--enable-dp-attention"),
        ("--pp 2", "--pipeline-parallel-size 2"),
        ("--max-running-requests 9 --max-mamba-cache-size 8", "--max-mamba-cache-size 8"),
        ("--mamba-full-memory-ratio 0.5 --max-mamba-cache-size 8", "only one of them"),
    ],
)
def test_what_states_do_not_go_with_is_refused_by_name(line: str, named: str) -> None:
    with pytest.raises(ConfigError) as found:
        checked(line, HYBRID)
    assert named in f"{found.value} {found.value.hint}"
    checked(line, PLAIN)


@pytest.mark.parametrize(
    "line",
    [
        *("--max-mamba-cache-size 8", "--mamba-full-memory-ratio 2", "--mamba-track-interval 64"),
        *("--mamba-ssm-dtype bfloat16", "--mamba-scheduler-strategy no_buffer"),
    ],
)
def test_a_flag_about_states_is_idle_without_them(line: str, caplog) -> None:
    for model_config, reported in ((PLAIN, [f"{line.split()[0]} has no effect"]), (HYBRID, [])):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "banyan"):
            check_states(config_of(*line.split()), model_config, Environment())
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == reported


@pytest.mark.parametrize(
    "line",
    [
        "--mamba-ssm-dtype float16",
        "--mamba-radix-cache-strategy extra_buffer_lazy",
    ],
)
def test_other_forms_of_states_are_refused_and_ours_are_taken(line: str) -> None:
    with pytest.raises(ConfigError, match=line.split()[0]):
        config_of(*line.split())
    for ours in ("--mamba-ssm-dtype float32", "--mamba-scheduler-strategy extra_buffer"):
        config_of(*ours.split())


def test_ranks_that_cannot_share_a_state_are_refused_with_what_could() -> None:
    model_config = replace(HYBRID, state=StateFacts("delta", 3, heads=6, key_heads=3))
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 .* 3 parts of a state"):
        checked("--tp 2", model_config)
    checked("--tp 2", HYBRID)
