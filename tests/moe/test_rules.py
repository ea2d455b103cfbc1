"""What goes with the flags of experts, before anything is loaded."""

import pytest

from banyan.base.errors import ConfigError
from banyan.config.resolve import resolve
from tests.support.configs import MODEL_CONFIG, NOTHING
from tests.support.experts import SHARED, config_with
from tests.support.flags import config_of


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--ep-num-redundant-experts", "2"), "no rank holds whole experts"),
        (("--ep-dispatch-algorithm", "static"), "no rank holds whole experts"),
        (("--init-expert-location", "{}"), "no rank holds whole experts"),
        ((*SHARED, "--ep-num-redundant-experts", "3"), "2 ranks cannot share 4 experts"),
        ((*SHARED, "--init-expert-location", "map.pt"), "pickled files can run code"),
        ((*SHARED, "--init-expert-location", "nowhere.json"), "neither trivial, JSON nor"),
        (
            (*SHARED, "--ep-dispatch-algorithm", "fake", "--dp", "2", "--enable-dp-attention"),
            "fake cannot be combined with --enable-dp-attention",
        ),
    ],
)
def test_what_experts_cannot_be_placed_by_is_refused(flags, match) -> None:
    with pytest.raises(ConfigError, match=match):
        config_with(*flags)


def test_models_without_experts_have_nothing_to_place() -> None:
    with pytest.raises(ConfigError, match="this model has no experts"):
        resolve(config_of("--ep-num-redundant-experts", "2"), MODEL_CONFIG, NOTHING)


def test_fake_choices_are_warned_of(caplog) -> None:
    config_with(*SHARED, "--ep-dispatch-algorithm", "fake")
    assert "answers are not the model's" in caplog.text


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--elastic-ep-backend", "mooncake"), "expert copies do not replace a dead rank"),
    ],
)
def test_what_is_not_there_is_refused_with_its_reason(flags, match) -> None:
    with pytest.raises(ConfigError, match=match):
        config_of(*flags)


def test_what_others_ask_for_by_none_is_so() -> None:
    config_of("--moe-a2a-backend", "none", "--elastic-ep-backend", "none")
