r"""What drafts bring to servers of several makers: the same greedy requests to each of them.

They are asked in turn. Each server is named and has a URL with `/v1/completions`; the first
one is what the others are compared with. llama.cpp's own drafting beside Banyan's, on the same
files (what installs the peers is `python -m benchmarks.compare_peers`):

    llama-server -m BIG.gguf --port 8101 -t 2 -np 1
    llama-server -m BIG.gguf --port 8102 -t 2 -np 1 --spec-type ngram-simple
    llama-server -m BIG.gguf --port 8103 -t 2 -np 1 --spec-type draft-simple \
        -md SMALL.gguf --spec-draft-n-max 3
    banyan serve BIG.gguf --port 8104 --speculative-algorithm NGRAM
    python -m benchmarks.draft_servers plain=http://127.0.0.1:8101 lookup=http://127.0.0.1:8102 \
        draft=http://127.0.0.1:8103 banyan=http://127.0.0.1:8104 [--rounds 4] [--new 160]
"""

import argparse
import json
import time
import urllib.request
from pathlib import Path

from benchmarks.speculation import CHAT, TASKS


def asked(url: str, prompt: str, new: int) -> tuple[float, int]:
    """Seconds of one request, and the tokens of its answer."""
    body = {"model": "default", "prompt": prompt, "max_tokens": new, "temperature": 0}
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        usage = json.load(answer)["usage"]
    return time.perf_counter() - began, int(usage["completion_tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--new", type=int, default=160)
    parser.add_argument("--problems", type=Path, help="HumanEval's file, or a part of it")
    parser.add_argument(
        "--tasks", nargs="*", default=[name for name in TASKS if name != "nonsense"]
    )
    options = parser.parse_args()
    servers = dict(each.split("=", 1) for each in options.servers)
    groups = {
        name: [CHAT.format(TASKS[name].format(i=3 + 7 * i)) for i in range(options.rounds)]
        for name in options.tasks
    }
    if options.problems is not None:
        lines = options.problems.read_text().splitlines()[: options.rounds]
        groups["completing functions"] = [json.loads(line)["prompt"] for line in lines]
    for url in servers.values():
        asked(url, CHAT.format("Count to twenty."), 60)
    print("| task | " + " | ".join(f"{name}, tokens/s" for name in servers) + " | ratios |")
    print("|---" * (len(servers) + 2) + "|")
    for task, prompts in groups.items():
        found = {name: [0.0, 0] for name in servers}
        for at, prompt in enumerate(prompts):
            for name in list(servers) if at % 2 else list(servers)[::-1]:
                seconds, tokens = asked(servers[name], prompt, options.new)
                found[name] = [found[name][0] + seconds, found[name][1] + tokens]
        speeds = [tokens / seconds for seconds, tokens in found.values()]
        ratios = ", ".join(f"{speed / speeds[0]:.2f}" for speed in speeds[1:])
        print(
            f"| {task} | " + " | ".join(f"{s:.0f}" for s in speeds) + f" | {ratios} |", flush=True
        )


if __name__ == "__main__":
    main()
