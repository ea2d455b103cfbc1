"""What `banyan simulate` refuses before it looks at a model."""

import pytest

from banyan.base.errors import ConfigError
from banyan.cli.simulate import simulate


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--speculative-algorithm", "NGRAM"], "--speculative-algorithm"),
        (["--enable-hierarchical-cache", "--hicache-storage-backend", "file"], "--hicache-storage"),
        (["--num-continuous-decode-steps", "4"], "--num-continuous-decode-steps"),
        (["--lora-paths", "a=/nowhere"], "--lora-paths"),
    ],
)
def test_what_would_be_planned_for_and_never_come_is_refused(words: list[str], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}.* is not simulated"):
        simulate(["demo", *words])
