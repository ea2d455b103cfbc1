"""Print an answer token by token, with the standard library alone.

Start a server, then run the program:

    banyan serve
    python examples/stream.py
"""

import json
import os
import urllib.request

URL = os.environ.get("BANYAN_URL", "http://127.0.0.1:30000")


def main() -> None:
    body = {
        "messages": [{"role": "user", "content": "Name the days of the week."}],
        "max_tokens": 32,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    url = f"{URL}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as events:
        for line in events:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                delta = json.loads(data)["choices"][0]["delta"]
                print(delta.get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
