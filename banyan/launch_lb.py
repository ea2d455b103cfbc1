"""`python -m banyan.launch_lb`: refused, as no replica only prefills or only decodes."""

import sys

from banyan.base.errors import ConfigError

HELP = """python -m banyan.launch_lb: there are no prefill and decode servers in this build.

One python -m banyan.launch_server does both, and --dp-size N balances N replicas."""

if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(HELP)
        raise SystemExit(0)
    refusal = ConfigError(
        "there are no prefill and decode servers to balance in this build",
        hint="one python -m banyan.launch_server does both",
    )
    print(f"banyan: error: {refusal}", file=sys.stderr)
    raise SystemExit(refusal.exit_code)
