"""The exact path against transformers: same tokens, same log-probabilities, on the demo model.

transformers dequantises the same GGUF file to float32. One teacher-forced forward over prompt and
answer proves as much as a generation: every answer token must be the reference's likeliest.
"""

import functools
from pathlib import Path

import pytest

from banyan.llm import Engine

NEW_TOKENS = 32
MAX_LOGPROB_GAP = 1e-4
TIE_GAP = 1e-4
"""Likeliest logits closer than this may fall either way; a report counts them."""


def chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = (
    chat("What is the capital of France?"),
    chat("Name three primary colours."),
    chat("Write a Python function that reverses a string."),
    chat("Explain why the sky is blue in two sentences."),
    chat("Translate 'good morning' into Spanish, German and Italian."),
    chat("什么是光合作用？"),
    chat("日本で一番高い山は何ですか？"),
    chat("What does 🌳 mean? Answer with emoji 🙂🙃."),
    chat("What is 17 + 25?"),
    "The first ten prime numbers are 2, 3, 5,",
    "Water boils at",
    "def fibonacci(n):\n    ",
    "SELECT name, age FROM users WHERE",
    "Shopping list:\n1. milk\n2. bread\n3.",
    "Once upon a time, in a forest of banyan trees,",
    '{"name": "Ada", "born": 1815, "field":',
    "人工知能とは、",
    "🙂🙃🙂🙃🙂",
    "A",
    "The library opens at nine. " * 100 + "When does the library open? It opens at",
)


@pytest.fixture(scope="module")
def answers(demo_model: Path) -> list[dict]:
    """Our greedy answers, prompt log-probabilities included."""
    flags = {"cpu_activations": "fp32", "max_total_tokens": 8192, "log_level": "error"}
    with Engine(model_path="demo", **flags) as engine:
        return engine.generate(
            prompt=list(PROMPTS),
            sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
        )


@pytest.fixture(scope="module")
def reference(demo_model: Path, answers: list[dict]):
    """One float32 log-probability table per answer: [positions, vocabulary]."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate", reason="transformers needs it to read GGUF")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        demo_model.parent, gguf_file=demo_model.name, dtype=torch.float32
    )

    @functools.cache
    def table(i: int):
        ids = prompt_ids(answers[i]) + answers[i]["output_ids"]
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)  # [tokens, vocab]

    return table


def prompt_ids(answer: dict) -> list[int]:
    return [token for _, token, _ in answer["meta_info"]["input_token_logprobs"]]


def test_the_long_prompt_is_long_and_every_answer_has_its_length(answers):
    assert answers[-1]["meta_info"]["prompt_tokens"] >= 600
    assert [len(a["output_ids"]) for a in answers] == [NEW_TOKENS] * len(PROMPTS)


@pytest.mark.slow
def test_every_greedy_token_is_the_likeliest_of_the_reference(answers, reference):
    wrong, ties = [], []
    for i, answer in enumerate(answers):
        first = answer["meta_info"]["prompt_tokens"] - 1
        best = reference(i)[first : first + NEW_TOKENS].topk(2)  # rows of answer tokens
        for j, token in enumerate(answer["output_ids"]):
            gap = (best.values[j, 0] - best.values[j, 1]).item()
            if gap < TIE_GAP:
                ties.append((i, j, gap))
            elif token != best.indices[j, 0].item():
                wrong.append((PROMPTS[i][:30], j, token, best.indices[j, 0].item(), gap))
    print(f"near ties (prompt, position, gap): {ties}")
    assert not wrong, wrong[:10]
    assert len(ties) <= 3


@pytest.mark.slow
def test_prompt_and_output_logprobs_agree_with_the_reference(answers, reference):
    worst = 0.0
    for i, answer in enumerate(answers):
        table, meta = reference(i), answer["meta_info"]
        scores = meta["input_token_logprobs"] + meta["output_token_logprobs"]
        assert len(scores) == meta["prompt_tokens"] + NEW_TOKENS
        assert scores[0][0] is None
        for position, (logprob, token, _) in enumerate(scores[1:], start=1):
            worst = max(worst, abs(logprob - table[position - 1, token].item()))
    print(f"worst log-probability difference: {worst:.2e}")
    assert worst <= MAX_LOGPROB_GAP
