"""`python -m sglang.check_env …` is `banyan doctor`."""

import sys

from banyan.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["doctor", *sys.argv[1:]]))
