"""Sparse attention far beyond what it chooses: 8,192 tokens, of which each reads 2,048."""

import os
from pathlib import Path

import pytest
import torch

import banyan
from tests.models.families import tiny

TOKENS, CHOSEN, SCORED = 8192, 2048, 512
SIZES = {
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"max_position_embeddings": 2 * TOKENS, "index_n_heads": 12},
}
PROMPT = [(7 * i * i + 3 * i + i // 97) % 97 for i in range(TOKENS)]
ASKED = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def output_of(folder: Path, **more) -> tuple[list[int], torch.Tensor]:
    """Tokens, and log-probabilities of the prompt's last tokens and of these."""
    with banyan.Engine(
        model_path=str(folder),
        skip_tokenizer_init=True,
        engine_mode="inprocess",
        cpu_activations="fp32",
        chunked_prefill_size=1024,
        max_total_tokens=2 * TOKENS,
        **more,
    ) as engine:
        answer = engine.generate(
            input_ids=PROMPT,
            sampling_params=ASKED,
            return_logprob=True,
            logprob_start_len=TOKENS - SCORED,
        )
    meta = answer["meta_info"]
    scores = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    return answer["output_ids"], torch.tensor([score[0] for score in scores])


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("LONG"), reason="make test-long runs it")
def test_what_an_indexer_chooses_of_8192_tokens_is_what_transformers_chooses(tmp_path):
    reference = tiny("deepseek v3.2", tmp_path / "sparse", index_topk=CHOSEN, **SIZES)
    tiny("deepseek v3.2", tmp_path / "dense", index_topk=2 * TOKENS, **SIZES)

    tokens, scores = output_of(tmp_path / "sparse")
    _, dense = output_of(tmp_path / "dense")
    again = output_of(tmp_path / "sparse", threads=1)

    ids = PROMPT + tokens
    with torch.no_grad():
        logits = reference(torch.tensor([ids[:-1]]), logits_to_keep=SCORED + len(tokens)).logits[0]
    wanted = torch.tensor(ids[TOKENS - SCORED + 1 :])
    logits = logits[-len(wanted) :].float()
    expected = logits.log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
    assert tokens == logits[-len(tokens) :].argmax(-1).tolist()
    assert (scores[-len(expected) :] - expected).abs().max() < 1e-3
    assert (dense - scores).abs().max() > 0.1, "the choice changes what is read"
    assert again[0] == tokens and torch.equal(again[1], scores)
