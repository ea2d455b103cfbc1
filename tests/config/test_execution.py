"""How a model is carried out: what flags ask for together, and what cannot be promised."""

from dataclasses import replace

import pytest

from banyan.base.errors import ConfigError
from banyan.config.resolve import resolve
from banyan.config.rules.execution import with_draft_attention
from banyan.config.schema import Config
from banyan.model_config.model_config import FULL, WINDOW
from tests.support.configs import MODEL_CONFIG, NOTHING
from tests.support.flags import config_of


def resolved(*flags: str) -> Config:
    model_config = replace(MODEL_CONFIG, num_heads=6, num_kv_heads=6, intermediate_size=120)
    return resolve(config_of(*flags), model_config, NOTHING)


def test_a_promise_that_cannot_be_kept_is_refused_with_the_reason() -> None:
    flags = ("--model-impl", "transformers")
    assert resolved(*flags).device.is_deterministic is False
    with pytest.raises(ConfigError, match="cannot be combined with --model-impl transformers"):
        resolved(*flags, "--enable-deterministic-inference")


def test_a_promise_that_can_be_kept_is_accepted() -> None:
    assert resolved("--enable-deterministic-inference", "--tp", "3").device.is_deterministic


def test_white_space_has_one_rule_and_a_pattern_that_is_one() -> None:
    flag = "--constrained-json-whitespace-pattern"
    with pytest.raises(ConfigError, match="is not a regex"):
        resolved(flag, "[ ")
    with pytest.raises(ConfigError, match="both set the white space"):
        resolved(flag, " ", "--constrained-json-disable-any-whitespace")
    assert resolved(flag, "[ ]?").grammar.between_tokens == "[ ]?"


def test_two_flags_about_windows_are_one_too_many() -> None:
    with pytest.raises(
        ConfigError, match="--swa-full-tokens-ratio cannot be combined with --hybrid-kvcache-ratio"
    ):
        resolved("--swa-full-tokens-ratio", "0.5", "--hybrid-kvcache-ratio", "0.5")


def test_a_mix_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"in \[0, 1\], or -1 for none, got -0.5"):
        resolved("--hybrid-kvcache-ratio", "-0.5")


def test_a_flag_about_windows_is_reported_where_there_are_none(
    heard: pytest.LogCaptureFixture,
) -> None:
    flags = config_of("--disable-hybrid-swa-memory")
    kinds = (FULL, WINDOW)
    resolve(flags, replace(MODEL_CONFIG, layer_kinds=kinds, window=8), NOTHING)
    assert "window" not in heard.text
    resolve(flags, MODEL_CONFIG, NOTHING)
    assert (
        "--disable-hybrid-swa-memory has no effect: this model has no sliding-window" in heard.text
    )


def test_a_kernel_that_is_forced_by_name_goes_before_a_backend() -> None:
    mine = '{"paged_attention": "reference"}'
    device = resolved("--attention-backend", "torch_native", "--kernels", mine).device
    assert device.kernels == {"paged_attention": "reference"}


@pytest.mark.parametrize(
    ("flags", "attention", "phase"),
    [
        (("--prefill-attention-backend", "torch_native"), "auto", "prefill"),
        (("--decode-attention-backend", "torch_native"), "auto", "decode"),
        (
            (
                *("--attention-backend", "torch_native"),
                *("--decode-attention-backend", "triton"),
            ),
            "auto",
            "prefill",
        ),
        (
            (
                *("--prefill-attention-backend", "torch_native"),
                *("--decode-attention-backend", "torch_native"),
            ),
            "torch_native",
            "",
        ),
        (("--prefill-attention-backend", "triton"), "auto", ""),
    ],
)
def test_phases_have_their_own_attention(
    flags: tuple[str, ...], attention: str, phase: str
) -> None:
    device = resolved(*flags).device
    assert (device.attention, device.torch_phase) == (attention, phase)
    assert device.is_eager == bool(phase)
    forced = device.kernels.get("paged_attention", "")
    assert bool(forced) == (attention == "torch_native")


def test_the_draft_model_has_its_own_attention() -> None:
    torch_drafts = resolved("--speculative-draft-attention-backend", "torch_native")
    assert not torch_drafts.device.kernels
    kernels = with_draft_attention(torch_drafts).device.kernels
    assert kernels == {"paged_attention": "torch_attention:paged_attention"}
    own = ("--speculative-draft-attention-backend", "triton", "--attention-backend", "torch_native")
    assert not with_draft_attention(resolved(*own)).device.kernels
