"""`python -m banyan.launch_router …` is `banyan router`, as SGLang spells it."""

import sys

from banyan.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["router", *sys.argv[1:]]))
