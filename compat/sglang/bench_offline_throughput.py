"""`python -m sglang.bench_offline_throughput …` is `banyan bench throughput`."""

import sys

from banyan.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "throughput", *sys.argv[1:]]))
