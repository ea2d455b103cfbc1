"""`python -m banyan.launch_router`: refused, as there is no router of several replicas."""

import sys

from banyan.base.errors import ConfigError

if __name__ == "__main__":
    refusal = ConfigError(
        "there is no router in this build",
        hint="start the replicas with python -m banyan.launch_server and put a proxy in front",
    )
    print(f"banyan: error: {refusal}", file=sys.stderr)
    raise SystemExit(refusal.exit_code)
