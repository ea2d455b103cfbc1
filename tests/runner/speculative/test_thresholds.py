"""--speculative-accept-threshold-single and -acc: sampled answers accept more drafts."""

from pathlib import Path

import numpy as np
import pytest

from banyan.ops.sampling import draw, quantile, relaxed_token, support
from tests.support.drafts import LONG, answers, start
from tests.system.checkpoint import write_tiny_model

DRAWN = {"sampling_params": LONG | {"temperature": 1.0, "sampling_seed": 5}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("thresholds") / "model")


FLAGS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


@pytest.mark.parametrize(
    ("single", "total"), [(1.0, 1.0), (1.0, 0.5), (1.0, 0.1), (0.3, 1.0), (0.0, 1.0), (1.0, 0.0)]
)
def test_a_draft_is_accepted_as_often_as_the_thresholds_say(single: float, total: float) -> None:
    logits = np.log(np.array([0.2, 0.4, 0.3, 0.1], np.float32))
    weight, trials = support(logits, 1.0, 0, 1.0, 0.0), 4000
    for draft, p in enumerate((0.2, 0.4, 0.3, 0.1)):
        count = 0
        for seed in range(trials):
            token = draw(logits, 1.0, 0, 1.0, 0.0, quantile(seed, 7))
            at = quantile(seed ^ 99, 7)
            count += relaxed_token(token, draft, weight, at, single, total) == draft
        is_certain = p >= single - 1e-6 or total == 0
        wanted = 1.0 if is_certain else min(1.0, p / total)
        assert abs(count / trials - wanted) < 4 * (0.25 / trials) ** 0.5


def test_a_token_that_may_not_come_is_never_accepted() -> None:
    weight = support(np.array([0.0, -np.inf], np.float32), 1.0, 0, 1.0, 0.0)
    assert relaxed_token(0, 1, weight, 0, 0.0, 0.0) == 0


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_low_threshold_accepts_every_draft(model: Path, flag: str, ranks: int) -> None:
    """And none of a greedy answer that the model does not choose."""
    with start(model, is_drafting=False) as engine:
        greedy = answers(engine)[0]["output_ids"]
    more = {"tp_size": ranks} if ranks > 1 else {}
    with start(model, **{flag: 1e-9}, **more) as engine:
        assert answers(engine)[0]["output_ids"] == greedy
        meta = answers(engine, **DRAWN)[0]["meta_info"]
    assert meta["spec_num_correct_drafts"] == meta["spec_num_proposed_drafts"] > 10
