"""Published GGUF models on the exact path: transformers' logits and greedy tokens.

Set BANYAN_TEST_MODELS to a folder that holds the files; without it these tests skip.
"""

import os
from pathlib import Path

import pytest
import torch

from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind
from banyan.tokenizer.gguf_tokenizer import load_gguf_tokenizer
from tests.models.conftest import PagedModel

CPU = torch.device("cpu")
NUM_TOKENS = 24
PROMPTS = {
    "gemma-3-270m-q4_k_m.gguf": [2, 818, 5279, 529, 7001, 563],  # The capital of France is
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": [750, 75698, 1445, 982, 262, 421, 308, 366, 220]
    + [17, 510, 286, 470, 308, 198, 262, 470],  # the fibonacci function up to its last return
}


def model_file(name: str) -> Path:
    folder = os.environ.get("BANYAN_TEST_MODELS", "")
    if not folder or not (Path(folder) / name).is_file():
        pytest.skip(f"no {name}: set BANYAN_TEST_MODELS to the folder that holds it")
    return Path(folder) / name


def greedy(model, prompt: list[int], count: int) -> list[int]:
    pages = PagedModel(model)
    (logits,) = pages.step([(0, prompt)])
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < count:
        (logits,) = pages.step([(0, tokens[-1:])])
        tokens.append(int(logits[-1].argmax()))
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
@torch.inference_mode()
def test_greedy_tokens_equal_those_of_transformers(name):
    from transformers import AutoModelForCausalLM

    path, prompt = model_file(name), PROMPTS[name]
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model_config = read_model_config(str(path))
    ops = bind("cpu", CPU, torch.float32, frozenset(), model_config.head_dim, exact=True)

    model = load_model(model_config, Build(ops))
    tokens = greedy(model, prompt, NUM_TOKENS)

    everything = torch.tensor([prompt * (600 // len(prompt)) + tokens])  # beyond the window
    expected = reference(everything).logits[0]
    (logits,) = PagedModel(model, max_pages=160).step([(0, everything[0].tolist())])
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=0)
    generated = reference.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
    )
    assert tokens == generated[0, len(prompt) :].tolist()


TEXTS = (
    "The capital of France is",
    "Hello   world\n\n\n  indented\ttab",
    "def f(x):\n    return x**2  # héllo 世界 🙂🙂",
    " " * 13 + "x" + "\n" * 5 + "\t" * 4,
    "1234567 3.14 I'll we'VE don't",
    "naïve café ﬁ Ⅷ \u200b\u0301x مرحبا بالعالم",
    "<bos>hi<eos><start_of_turn>user\nhi<end_of_turn>\n<|im_start|>user\nhi<|im_end|>\n",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_token_ids_equal_those_of_transformers(name):
    from transformers import AutoTokenizer

    path = model_file(name)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=name)

    ours = load_gguf_tokenizer(str(path))

    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected
