"""MiMo against transformers' Qwen2, which is the same but for the layer that drafts."""

import torch

from banyan.model_config.checkpoint import read_model_config
from tests.models.drafting import tiny_mimo
from tests.support.logits import PROMPT, load


@torch.no_grad()
def test_logits_are_those_of_the_model_without_the_layer_that_drafts(ops, paged, tmp_path):
    plain = tiny_mimo(tmp_path)

    (logits,) = paged(load(tmp_path, ops)).step([(0, PROMPT)])

    torch.testing.assert_close(logits, plain.head(plain.states(PROMPT)), atol=1e-4, rtol=0)
    assert read_model_config(str(tmp_path)).num_mtp_layers == 1
