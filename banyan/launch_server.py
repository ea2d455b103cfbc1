"""`python -m banyan.launch_server --model-path M …` is `banyan serve`, as SGLang spells it."""

import sys

from banyan.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["serve", *sys.argv[1:]]))
