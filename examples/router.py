"""Send requests through a router and show which servers it knows.

Start a router with two servers of its own, then run the program:

    banyan router --model-path demo --dp-size 2 --port 30000
    python examples/router.py
"""

import json
import os
import urllib.request

URL = os.environ.get("BANYAN_URL", "http://127.0.0.1:30000")


def call(path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def main() -> None:
    for worker in call("/workers")["workers"]:
        print(worker["url"], "healthy" if worker["is_healthy"] else "not healthy")
    for country in ("France", "Italy"):
        body = {"prompt": f"The capital of {country} is", "max_tokens": 8, "temperature": 0}
        print(country, call("/v1/completions", body)["choices"][0]["text"].strip())


if __name__ == "__main__":
    main()
