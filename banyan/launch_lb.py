"""`python -m banyan.launch_lb …` is `banyan lb`, as SGLang spells it."""

import sys

from banyan.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["lb", *sys.argv[1:]]))
