"""Load a LoRA adapter into a running server and ask it by name.

Start a server for the adapter's base model, then run the program:

    banyan serve MODEL --enable-lora
    python examples/lora.py ADAPTER_FOLDER
"""

import json
import os
import sys
import urllib.request

URL = os.environ.get("BANYAN_URL", "http://127.0.0.1:30000")


def post(path: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def main() -> None:
    post("/load_lora_adapter", {"lora_name": "mine", "lora_path": sys.argv[1]})
    chat = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16}
    for model in ("demo", "mine"):
        answer = post("/v1/chat/completions", {"model": model, "temperature": 0, **chat})
        print(model, repr(answer["choices"][0]["message"]["content"]))
    post("/unload_lora_adapter", {"lora_name": "mine"})


if __name__ == "__main__":
    main()
