"""Rules of --enable-dp-attention and --moe-dense-tp-size, checked before anything is loaded."""

from dataclasses import replace

import pytest

from banyan.base.errors import ConfigError
from banyan.config.resolve import resolve
from banyan.config.rules.ignored import ignored_flags
from banyan.dp_attention.rules import of_replica
from banyan.model_config.model_config import ExpertFacts, ModelConfig, Pooling
from tests.support.configs import MODEL_CONFIG, NOTHING
from tests.support.flags import config_of

JOINED = ("--enable-dp-attention", "--dp", "2", "--tp", "4")
EXPERTS = replace(
    MODEL_CONFIG, experts=ExpertFacts(count=4, per_token=2, inner=32, dense_layers=(0,))
)


def test_ranks_are_shared_out_among_joined_replicas() -> None:
    parallel = resolve(config_of(*JOINED), MODEL_CONFIG, NOTHING).parallel
    assert (parallel.attention_ranks, parallel.world) == (2, 2)
    assert resolve(config_of(*JOINED[1:]), MODEL_CONFIG, NOTHING).parallel.world == 4
    mine = of_replica(resolve(config_of(*JOINED), MODEL_CONFIG, NOTHING), 1, "/folder/joined")
    assert (mine.parallel.replica, mine.parallel.meeting) == (1, "file:///folder/joined")
    assert of_replica(config_of("--dp", "2"), 1, "/folder/joined").parallel.meeting == ""


def test_heads_are_cut_over_one_replica_and_columns_over_all() -> None:
    """Four heads and 128 columns: eight ranks are too many for one replica."""
    with pytest.raises(ConfigError, match="4 attention heads"):
        resolve(config_of("--tp", "8"), MODEL_CONFIG, NOTHING)
    assert (
        resolve(config_of("--tp", "8", "--dp", "2", JOINED[0]), MODEL_CONFIG, NOTHING).parallel.tp
        == 8
    )
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel-size 6 \(heads are divided within each of 2 replicas"
    ):
        resolve(config_of("--tp", "6", "--dp", "2", JOINED[0]), MODEL_CONFIG, NOTHING)


@pytest.mark.parametrize(
    ("flags", "model_config", "match"),
    [
        (("--tp", "3"), MODEL_CONFIG, "3 ranks cannot be divided among .* 2 replicas"),
        (
            ("--pp", "2"),
            MODEL_CONFIG,
            "--enable-dp-attention cannot be combined with --pipeline-parallel-size",
        ),
        (
            ("--nnodes", "4", "--dist-init-addr", "127.0.0.1:5000"),
            MODEL_CONFIG,
            "2 replicas cannot be spread evenly over --nnodes 4 nodes",
        ),
        (
            ("--speculative-algorithm", "NEXTN"),
            MODEL_CONFIG,
            "cannot be combined with --speculative-algorithm NEXTN without --enable-dp-lm-head",
        ),
        (
            ("--model-impl", "transformers"),
            MODEL_CONFIG,
            "--enable-dp-attention cannot be combined with --model-impl trans",
        ),
        ((), replace(MODEL_CONFIG, pooling=Pooling()), "an embedding model"),
        (
            ("--moe-dense-tp-size", "1"),
            MODEL_CONFIG,
            "--moe-dense-tp-size 1: this model has no experts",
        ),
        (("--moe-dense-tp-size", "2"), EXPERTS, "sharded over all ranks or whole on each"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    flags: tuple[str, ...], model_config: ModelConfig, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        resolve(config_of(*JOINED, *flags), model_config, NOTHING)


def test_dense_blocks_that_are_whole_need_not_divide() -> None:
    model_config = replace(EXPERTS, intermediate_size=127)
    with pytest.raises(ConfigError, match="127 MLP columns"):
        resolve(config_of("--tp", "2"), model_config, NOTHING)
    flags = ("--tp", "2", "--moe-dense-tp-size", "1")
    assert resolve(config_of(*flags), model_config, NOTHING).parallel.dense_tp == 1


def test_one_replica_has_nobody_to_be_joined_with_and_that_is_reported() -> None:
    config = config_of("--enable-dp-attention", "--enable-dp-lm-head")
    reported = list(ignored_flags(config, {}, NOTHING))
    assert any("--enable-dp-attention is accepted but has no effect" in line for line in reported)
    assert any("--enable-dp-lm-head is accepted but has no effect" in line for line in reported)
    assert not resolve(config, MODEL_CONFIG, NOTHING).parallel.uses_dp_attention
    joined = config_of(*JOINED, "--enable-dp-lm-head")
    assert not any("--enable-dp" in line for line in ignored_flags(joined, {}, NOTHING))
