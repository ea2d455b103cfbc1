"""What goes with --attn-cp-size, before anything is loaded."""

from dataclasses import replace

import pytest

from banyan.base.errors import ConfigError
from banyan.config.resolve import resolve
from banyan.config.rules.ignored import ignored_flags
from banyan.model_config.model_config import ModelConfig, Pooling
from tests.dp_attention.test_rules import EXPERTS
from tests.support.configs import MODEL_CONFIG, NOTHING
from tests.support.flags import config_of

DIVIDED = ("--attn-cp-size", "2", "--tp", "4")


def test_heads_are_cut_over_the_ranks_of_one_share() -> None:
    parallel = resolve(config_of(*DIVIDED), MODEL_CONFIG, NOTHING).parallel
    assert (parallel.attention_ranks, parallel.cp, parallel.world) == (2, 2, 4)
    with pytest.raises(ConfigError, match="4 attention heads"):
        resolve(config_of("--tp", "8"), MODEL_CONFIG, NOTHING)
    assert resolve(config_of("--tp", "8", *DIVIDED[:2]), MODEL_CONFIG, NOTHING).parallel.world == 8
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel-size 6 \(heads are divided within each of 2 context-"
    ):
        resolve(config_of("--tp", "6", *DIVIDED[:2]), MODEL_CONFIG, NOTHING)


def test_the_switch_alone_makes_a_share_of_every_rank() -> None:
    parallel = resolve(
        config_of("--tp", "4", "--enable-prefill-cp"), MODEL_CONFIG, NOTHING
    ).parallel
    assert (parallel.attention_ranks, parallel.cp) == (1, 4)
    parallel = resolve(config_of(*DIVIDED, "--enable-prefill-cp"), MODEL_CONFIG, NOTHING).parallel
    assert (parallel.attention_ranks, parallel.cp) == (2, 2)


@pytest.mark.parametrize(
    ("flags", "model_config", "match"),
    [
        (("--tp", "3"), MODEL_CONFIG, "3 ranks cannot be divided into 2 equal shards"),
        (
            ("--dp", "2", "--enable-dp-attention"),
            MODEL_CONFIG,
            "cannot be combined with --enable-dp-attention",
        ),
        (("--pp", "2"), MODEL_CONFIG, "cannot be combined with --pipeline-parallel-size"),
        (
            ("--model-impl", "transformers"),
            MODEL_CONFIG,
            "cannot be combined with --model-impl transformers",
        ),
        (
            ("--speculative-algorithm", "NGRAM", "--speculative-ngram-min-bfs-breadth", "2"),
            MODEL_CONFIG,
            "cannot be combined with --speculative-ngram-min-bfs-breadth 2",
        ),
        (("--forward-hooks", "{}"), MODEL_CONFIG, "cannot be combined with --forward-hooks"),
        (
            ("--debug-tensor-dump-output-folder", "d"),
            MODEL_CONFIG,
            "cannot be combined with --debug-tensor-dump-output-fol",
        ),
        (
            ("--debug-tensor-dump-inject", "--debug-tensor-dump-input-file", "f"),
            MODEL_CONFIG,
            "cannot be combined with --debug-tensor-dump-inject",
        ),
        (
            ("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
            MODEL_CONFIG,
            "cannot be combined with --hicache-storage-backend",
        ),
        (
            ("--expert-distribution-recorder-mode", "stat"),
            EXPERTS,
            "cannot be combined with .*recorder-mode",
        ),
        (
            ("--enable-return-routed-experts",),
            EXPERTS,
            "cannot be combined with .*return-routed-experts",
        ),
        (("--ep", "4", "--enable-eplb"), EXPERTS, "cannot be combined with --enable-eplb"),
        (
            ("--ep", "4", "--ep-num-redundant-experts", "4"),
            EXPERTS,
            "cannot be combined with .*redundant-experts",
        ),
        (
            ("--ep", "4", "--ep-dispatch-algorithm", "static"),
            EXPERTS,
            "cannot be combined with .*dispatch-algorithm",
        ),
        (
            ("--ep", "4", "--init-expert-location", "{}"),
            EXPERTS,
            "cannot be combined with .*expert-location",
        ),
        (
            ("--num-continuous-decode-steps", "4"),
            MODEL_CONFIG,
            "cannot be combined with several ranks",
        ),
        ((), replace(MODEL_CONFIG, pooling=Pooling()), "an embedding model"),
        ((), replace(MODEL_CONFIG, layer_kinds=("state", "full")), "recurrent states"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    flags: tuple[str, ...], model_config: ModelConfig, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        resolve(config_of(*DIVIDED, *flags), model_config, NOTHING)


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        (("--enable-prefill-cp",), "--enable-nsa-prefill-context-parallel"),
        (("--tp", "2", "--cp-strategy", "interleave"), "--nsa-prefill-cp-mode"),
        (("--cp-strategy", "round-robin-split"), "--nsa-prefill-cp-mode"),
    ],
)
def test_what_divides_nothing_is_reported(flags: tuple[str, ...], idle: str) -> None:
    origins = {"parallel.cp_split": "flag", "parallel.divides_prompts": "flag"}
    reported = list(ignored_flags(config_of(*flags), origins, NOTHING))
    assert any(f"{idle} is accepted but has no effect" in line for line in reported)
    assert resolve(config_of(*flags), MODEL_CONFIG, NOTHING).parallel.cp == 1
    all_of_it = config_of(*DIVIDED, "--enable-prefill-cp", "--cp-strategy", "interleave")
    assert not any(idle in line for line in ignored_flags(all_of_it, origins, NOTHING))
