"""Loads a checkpoint, and compares its logits with those of transformers."""

import copy

import torch

from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model

PROMPT = [(7 * i * i + 3 * i) % 97 for i in range(60)]


def load(folder, ops):
    return load_model(read_model_config(str(folder)), Build(ops))


def expected_logits(reference, prompt=PROMPT):
    with torch.no_grad():
        return reference(torch.tensor([prompt])).logits[0]


def assert_as_expected(logits, reference) -> None:
    """Within 1e-4 of the reference, or as near to it as that is to itself in float64: how far
    float32 goes astray in some models depends on the processor."""
    expected = expected_logits(reference)
    assert expected.std() > 0.02
    bound = 1e-4
    if (logits - expected).abs().max() > bound:
        exact = expected_logits(copy.deepcopy(reference).double())
        bound = max(bound, float((expected - exact).abs().max()))
        assert bound < 1e-3 * float(expected.std())
    torch.testing.assert_close(logits, expected, atol=bound, rtol=0)
