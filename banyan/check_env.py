"""`python -m banyan.check_env` is `banyan doctor`, as SGLang spells it."""

import sys

from banyan.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["doctor", *sys.argv[1:]]))
