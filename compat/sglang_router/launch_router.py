"""`python -m sglang_router.launch_router …` is `banyan router`."""

import sys

from banyan.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["router", *sys.argv[1:]]))
