"""Find the text that fits a question by embeddings.

Start a server with an embedding model, then run the program:

    banyan serve all-minilm-l6
    pip install openai && python examples/retrieval.py
"""

import os

from openai import OpenAI

URL = os.environ.get("BANYAN_URL", "http://127.0.0.1:30000")
TEXTS = [
    "The server listens on 127.0.0.1 unless --host names another address.",
    "An adapter of PEFT is loaded with --lora-paths NAME=FOLDER.",
    "Prompts that begin alike share their keys and values in the cache.",
]


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("BANYAN_API_KEY", "none"))
    question = "How do I load an adapter?"
    answer = client.embeddings.create(model="all-minilm-l6", input=[question, *TEXTS])
    asked, *vectors = [item.embedding for item in answer.data]
    scores = [sum(a * b for a, b in zip(asked, vector, strict=True)) for vector in vectors]
    for score, text in sorted(zip(scores, TEXTS, strict=True), reverse=True):
        print(f"{score:.3f}  {text}")


if __name__ == "__main__":
    main()
