"""`python -m banyan.launch_lb`: refused, as no replica only prefills or only decodes."""

import sys

from banyan.base.errors import ConfigError

if __name__ == "__main__":
    refusal = ConfigError(
        "there are no prefill and decode servers to balance in this build",
        hint="one python -m banyan.launch_server does both",
    )
    print(f"banyan: error: {refusal}", file=sys.stderr)
    raise SystemExit(refusal.exit_code)
