"""Rotary angles against the RoPE functions of transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from banyan.base.errors import ModelError
from banyan.layers.rotary import Rotary
from banyan.model_config.model_config import RopeFacts
from banyan.ops import reference

CPU = torch.device("cpu")
HEAD_DIM = 64
SCALED = {"factor": 8.0, "original_max_position_embeddings": 256}
KINDS = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {**SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": SCALED,
}


def both(kind, numbers, context_length=2048):
    """(transformers' embedding, ours) for the same numbers."""
    rope = {"rope_type": kind, "rope_theta": 500000.0, **numbers}
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=context_length,
        rope_parameters=rope,
    )
    ours = {
        {"original_max_position_embeddings": "original_length"}.get(name, name): value
        for name, value in numbers.items()
    }
    facts = RopeFacts(theta=500000.0, kind=kind, **ours)
    return LlamaRotaryEmbedding(config), Rotary(
        HEAD_DIM, facts, context_length, context_length, reference, CPU
    )


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_magnitude_equal_those_of_transformers(kind):
    theirs, ours = both(kind, KINDS[kind])

    torch.testing.assert_close(ours.frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.magnitude == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_default_angles_equal_transformers_at_every_position():
    theirs, ours = both("default", {})
    positions = torch.tensor([0, 1, 17, 2047, 131071])

    cos, sin = ours(positions)

    expected_cos, expected_sin = theirs(torch.ones(1), positions[None])
    assert torch.equal(cos, expected_cos[0, :, : HEAD_DIM // 2])
    assert torch.equal(sin, expected_sin[0, :, : HEAD_DIM // 2])


@pytest.mark.parametrize("position", [0, 63, 64, 65, 200, 1000])
def test_dynamic_angles_take_the_length_of_each_position(position):
    theirs, ours = both("dynamic", {"factor": 4.0}, context_length=64)
    positions = torch.tensor([position])

    cos, sin = ours(positions)

    expected_cos, expected_sin = theirs(torch.ones(1), positions[None])
    torch.testing.assert_close(cos, expected_cos[0, :, : HEAD_DIM // 2], atol=1e-4, rtol=0)
    torch.testing.assert_close(sin, expected_sin[0, :, : HEAD_DIM // 2], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [*KINDS, "dynamic"])
def test_the_angle_of_a_position_does_not_depend_on_its_company(kind):
    _, ours = both(kind, KINDS.get(kind, {"factor": 4.0}), context_length=64)

    together = ours(torch.tensor([3, 5000, 70]))
    alone = [ours(torch.tensor([position])) for position in (3, 5000, 70)]

    assert torch.equal(together[0], torch.cat([cos for cos, _ in alone]))
    assert torch.equal(together[1], torch.cat([sin for _, sin in alone]))


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ModelError, match="spiral.*default.*longrope"):
        Rotary(HEAD_DIM, RopeFacts(kind="spiral"), 64, 64, reference, CPU)


def test_divisors_of_another_width_are_refused():
    _, ours = both("default", {})

    with pytest.raises(ModelError, match="31 RoPE factors"):
        ours.divide(torch.ones(31))


@pytest.mark.parametrize(("served_length", "is_long"), [(256, False), (257, True)])
def test_longrope_takes_its_long_factors_when_requests_may_be_long(served_length, is_long):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    short = [1.0 + 0.01 * i for i in range(HEAD_DIM // 2)]
    long = [1.5 + 0.5 * i for i in range(HEAD_DIM // 2)]
    numbers = {"original_max_position_embeddings": 256, "short_factor": short, "long_factor": long}
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **numbers},
    )
    facts = RopeFacts(
        kind="longrope",
        original_length=256,
        short_factor=tuple(short),
        long_factor=tuple(long),
    )

    ours = Rotary(HEAD_DIM, facts, 4096, served_length, reference, CPU)

    length = served_length if is_long else None
    frequencies, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, CPU, seq_len=length)
    torch.testing.assert_close(ours.frequencies, frequencies, rtol=1e-6, atol=0)
    assert ours.magnitude == pytest.approx(scaling, rel=1e-12)
