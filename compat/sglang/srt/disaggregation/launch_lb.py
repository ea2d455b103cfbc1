"""`python -m sglang.srt.disaggregation.launch_lb …` is `banyan lb`."""

import sys

from banyan.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["lb", *sys.argv[1:]]))
