"""`python -m sglang.bench_one_batch …` is `banyan bench batch`."""

import sys

from banyan.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "batch", *sys.argv[1:]]))
