"""Answer many prompts in one call, without a server.

    python examples/offline_batch.py [MODEL]

MODEL is a folder, a GGUF file or a short name; without it the demo model answers.
"""

import sys

import banyan

PROMPTS = [f"The capital of {country} is" for country in ("France", "Italy", "Japan", "Peru")]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    with banyan.Engine(model_path=model) as engine:
        answers = engine.generate(PROMPTS, {"temperature": 0, "max_new_tokens": 8})
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"{prompt}{answer['text']!r}")


if __name__ == "__main__":
    main()
