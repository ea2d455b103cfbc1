"""Draft tokens with an n-gram table: the answer is the same, in fewer steps.

python examples/speculation.py [MODEL]
"""

import sys

import banyan

PROMPT = "red, green, blue, yellow, orange, purple, " * 4
SAMPLING = {"temperature": 0, "max_new_tokens": 96, "ignore_eos": True}


def answer(model: str, **flags: object) -> dict:
    with banyan.Engine(model_path=model, **flags) as engine:
        return engine.generate(PROMPT, SAMPLING)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    plain = answer(model)
    drafted = answer(model, speculative_algorithm="NGRAM")
    print("same text:", plain["text"] == drafted["text"])
    print("tokens per step:", drafted["meta_info"]["spec_accept_length"])


if __name__ == "__main__":
    main()
