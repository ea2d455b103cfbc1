"""`python -m banyan.launch_router`: refused, as there is no router of several replicas."""

import sys

from banyan.base.errors import ConfigError

HELP = """python -m banyan.launch_router: there is no router of several servers in this build.

python -m banyan.launch_server takes the same flags: --dp-size N starts N replicas behind one
server, and --load-balance-method says which of them takes a request."""

if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(HELP)
        raise SystemExit(0)
    refusal = ConfigError(
        "there is no router in this build",
        hint="python -m banyan.launch_server takes the same line: --dp-size N starts N replicas "
        "behind one server",
    )
    print(f"banyan: error: {refusal}", file=sys.stderr)
    raise SystemExit(refusal.exit_code)
