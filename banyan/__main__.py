"""`python -m banyan` is the `banyan` command."""

from banyan.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
