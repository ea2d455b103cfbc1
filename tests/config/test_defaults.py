"""What a device suggests: taken where nothing was said, shown with its origin, refused never."""

import logging
from dataclasses import replace

import pytest

from banyan.base.errors import ConfigError
from banyan.config.defaults import Defaults, settings_of, settle, with_settings
from banyan.config.schema import Config
from tests.support.flags import config_of

DEVICE = Defaults("abacus", ("float32", "bfloat16"), 32, 1024, 64, 0.5)
SHAPED = replace(DEVICE, shapes=(1, 2, 4, 8, 16), captures_prompts=True)


def test_what_was_left_open_is_taken_from_the_device_with_its_name_as_origin() -> None:
    config, origins = settle(Config(), DEVICE)

    assert (config.device.name, config.model.activation_dtype) == ("abacus", "float32")
    assert (config.cache.page_size, config.cache.free_share) == (32, 0.5)
    assert (config.schedule.chunk_tokens, config.schedule.running_cap) == (1024, 64)
    assert set(origins.values()) == {"device abacus"}
    assert origins.keys() >= {"cache.page_size", "schedule.chunk_tokens", "model.activation_dtype"}


def test_what_was_said_stays_and_has_no_new_origin() -> None:
    words = ("--page-size", "64", "--chunked-prefill-size", "-1", "--dtype", "bfloat16")
    config, origins = settle(config_of(*words), DEVICE)

    assert (config.cache.page_size, config.schedule.chunk_tokens) == (64, -1)
    assert config.model.activation_dtype == "bfloat16"
    said = {"cache.page_size", "schedule.chunk_tokens", "model.activation_dtype"}
    assert not said & origins.keys()


def test_each_choice_is_logged_with_its_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("banyan"), "propagate", True)
    with caplog.at_level(logging.DEBUG, "banyan"):
        settle(Config(), DEVICE)
    assert "set page_size=32 because that suits abacus" in caplog.text


def test_settling_twice_changes_nothing() -> None:
    once, _ = settle(Config(), SHAPED)
    assert settle(once, SHAPED)[0] == once


def test_a_chunk_is_never_larger_than_the_prompts_of_a_step() -> None:
    config, _ = settle(config_of("--max-prefill-tokens", "100"), DEVICE)
    assert config.schedule.chunk_tokens == 100


def test_the_shapes_to_capture_are_those_that_are_named() -> None:
    def shapes(*words: str) -> tuple[int, ...]:
        return settle(config_of(*words), SHAPED)[0].device.shapes

    assert shapes() == (1, 2, 4, 8, 16)
    assert shapes("--cuda-graph-max-bs", "6") == (1, 2, 4, 6)
    assert shapes("--cuda-graph-max-bs", "24") == (1, 2, 4, 8, 16, 24)
    assert shapes("--cuda-graph-bs", "3", "12") == (3, 12)
    assert shapes("--cuda-graph-bs", "3", "12", "--cuda-graph-max-bs", "8") == (3,)


@pytest.mark.parametrize("word", ["half", "float16"])
def test_a_number_type_without_kernels_is_refused_with_those_that_have_some(word: str) -> None:
    config = config_of("--device", "cuda", "--dtype", word)
    with pytest.raises(ConfigError, match="--dtype float16: no kernel of abacus.*float32, bfloat"):
        settle(config, DEVICE)


def test_the_front_learns_what_the_engine_settled() -> None:
    config, origins = settle(Config(), SHAPED)
    assert with_settings(Config(), settings_of(config, origins)) == config


def test_prompt_sizes_are_those_that_are_named_up_to_a_bound() -> None:
    def shapes(*words: str, defaults: Defaults = SHAPED) -> tuple[int, ...]:
        return settle(config_of(*words), defaults)[0].device.prompt_shapes

    captures = "--enable-piecewise-cuda-graph"
    assert shapes() == shapes("--piecewise-cuda-graph-tokens", "8") == ()
    assert len(shapes(captures)) == 40
    assert (shapes(captures)[0], shapes(captures)[-1]) == (16, 4096)
    assert shapes(captures, "--piecewise-cuda-graph-max-tokens", "40") == (16, 32)
    assert shapes(captures, "--piecewise-cuda-graph-tokens", "9", "5", "9") == (5, 9)
    assert shapes(captures, defaults=DEVICE) == ()
