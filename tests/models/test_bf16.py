"""Checkpoints in bf16 on kernels that round activations to bf16, where the processor does that."""

import torch

from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model

PROMPT = [(7 * i * i + 3 * i) % 97 for i in range(60)]


def test_logits_are_nearer_to_float32_than_those_of_a_model_in_bf16(
    tiny_llama, compiled, paged, tmp_path
):
    """Only inputs of products are rounded: norms, sums and what goes on to layers are not."""
    made, _ = tiny_llama(hidden_size=192, num_attention_heads=6, intermediate_size=384)
    made.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    with torch.no_grad():
        theirs = made(torch.tensor([PROMPT])).logits[0].float()
        # Loaded anew: a cast of the model would keep its rotary frequencies rounded to bf16.
        float32 = type(made).from_pretrained(tmp_path / "bf16", dtype=torch.float32)
        exact = float32(torch.tensor([PROMPT])).logits[0]

    model = load_model(read_model_config(str(tmp_path / "bf16")), Build(compiled))
    (logits,) = paged(model).step([(0, PROMPT)])

    kernel = next(c.kernel for c in compiled.choices if c.label == "linear[BF16]")
    error = (logits - exact).norm() / (theirs - exact).norm()
    assert error < (0.7 if kernel == "linear:rounded" else 0.05)
    assert (error > 0.05) == (kernel == "linear:rounded"), "nothing was rounded"
