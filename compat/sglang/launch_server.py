"""`python -m sglang.launch_server …` is `banyan serve`."""

import sys

from banyan.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["serve", *sys.argv[1:]]))
