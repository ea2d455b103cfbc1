"""The command `sglang serve …` is `banyan serve …`."""

from banyan.cli.main import main as main
