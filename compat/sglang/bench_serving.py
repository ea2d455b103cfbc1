"""`python -m sglang.bench_serving …` is `banyan bench serving`."""

import sys

from banyan.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "serving", *sys.argv[1:]]))
