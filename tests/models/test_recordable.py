"""A pass is made of ops and views alone, so that it can be recorded once and replayed."""

import pytest
import torch

from tests.support.torch_calls import torch_calls

CPU = torch.device("cpu")


@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_consists_of_ops_and_views(tied, tiny_llama, ops):
    _, model_config = tiny_llama(tie_word_embeddings=tied, attention_bias=True, mlp_bias=True)

    assert torch_calls(model_config, ops) == []


def test_angles_that_depend_on_a_length_cannot_be_recorded(tiny_llama, ops):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    _, model_config = tiny_llama(rope_parameters=rope)

    assert "aten::cos" in torch_calls(model_config, ops)
