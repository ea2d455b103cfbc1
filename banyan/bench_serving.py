"""`python -m banyan.bench_serving …` is `banyan bench serving`, as SGLang spells it."""

import sys

from banyan.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["bench", "serving", *sys.argv[1:]]))
