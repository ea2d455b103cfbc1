"""What the flags about drafts come to, and what they do not go with."""

import pytest

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.config.resolve import resolve
from tests.support.configs import MODEL_CONFIG


def drafts_of(*words: str) -> int:
    return resolve(
        parse(list(words), Environment()), MODEL_CONFIG, Environment()
    ).speculative.drafts


NGRAM = ("--speculative-algorithm", "NGRAM")


@pytest.mark.parametrize(
    ("words", "drafts"),
    [
        ("", 11),
        ("--speculative-num-draft-tokens 4", 3),
        ("--speculative-num-steps 4", 4),
        ("--speculative-num-steps 4 --speculative-num-draft-tokens 3", 2),
        ("--speculative-num-steps 2 --speculative-num-draft-tokens 8", 2),
        ("--speculative-ngram-max-match-window-size 6", 5),
        ("--speculative-ngram-max-match-window-size 1", 1),
    ],
)
def test_drafts_are_what_both_bounds_allow(words: str, drafts: int) -> None:
    assert drafts_of(*NGRAM, *words.split()) == drafts


def test_without_an_algorithm_nothing_is_drafted_and_the_rest_is_reported(caplog) -> None:
    assert drafts_of() == 0 and not caplog.records
    assert drafts_of("--speculative-num-steps", "4") == 0
    assert "num steps has no effect" in caplog.text
    assert drafts_of("--speculative-eagle-topk", "4") == 0
    assert "eagle topk has no effect" in caplog.text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--speculative-algorithm DSPARK", "trained draft models are EAGLE, EAGLE3 and DFLASH"),
        (
            "--speculative-draft-model-path M --speculative-algorithm NGRAM",
            "drafts without a model",
        ),
        (
            "--speculative-algorithm NGRAM --speculative-eagle-topk 4",
            "NGRAM: only draft models read it",
        ),
        (
            "--speculative-algorithm NGRAM --speculative-ngram-min-bfs-breadth 4 "
            "--speculative-ngram-max-bfs-breadth 3",
            "is more than",
        ),
        (
            "--speculative-algorithm STANDALONE --speculative-ngram-min-bfs-breadth 4 "
            "--speculative-draft-model-path M",
            "only NGRAM reads it",
        ),
        (
            "--speculative-algorithm NGRAM --speculative-accept-threshold-acc 0.9 "
            "--enable-deterministic-inference",
            "answers depend on the drafts",
        ),
        ("--speculative-algorithm NGRAM --pp-size 2", "stages do not verify"),
        (
            "--speculative-algorithm NGRAM --speculative-ngram-branch-length 2 "
            "--speculative-ngram-min-match-window-size 2",
            "leaves no drafts",
        ),
        (
            "--speculative-algorithm NGRAM --speculative-ngram-min-match-window-size 13",
            "is more than",
        ),
        ("--speculative-algorithm NGRAM --speculative-ngram-capacity 17", "does not hold one"),
    ],
)
def test_what_drafts_do_not_go_with_is_refused_by_name(words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        drafts_of(*words.split())


@pytest.mark.parametrize(
    "words",
    [
        "--speculative-eagle-topk 1",
        "--speculative-accept-threshold-single 1.0 --speculative-accept-threshold-acc 1.0",
        "--speculative-ngram-min-bfs-breadth 1",
        "--speculative-attention-mode prefill",
        "--speculative-attention-mode decode",
        "--speculative-draft-load-format auto",
        "--speculative-moe-runner-backend triton --speculative-moe-a2a-backend none",
        "--speculative-draft-attention-backend ascend",
        "--speculative-draft-model-quantization unquant",
    ],
)
def test_what_asks_for_nothing_that_is_absent_is_accepted(words: str) -> None:
    assert drafts_of(*NGRAM, *words.split()) == 11
