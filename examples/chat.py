"""Ask one question with OpenAI's client.

Start a server, then run the program:

    banyan serve
    pip install openai && python examples/chat.py
"""

import os

from openai import OpenAI

URL = os.environ.get("BANYAN_URL", "http://127.0.0.1:30000")


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("BANYAN_API_KEY", "none"))
    question = "What is the capital of France?"
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": question}], temperature=0
    )
    print(answer.choices[0].message.content)
    print(answer.usage.completion_tokens, "tokens")


if __name__ == "__main__":
    main()
