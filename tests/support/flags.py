"""Flags as a user gives them. A proof of a flag takes its settings from here and nowhere else:
`tests/proofs` runs it once more with the flag's effect gone, and then it has to fail.
"""

from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.config.schema import Config


def config_of(*argv: str) -> Config:
    """What a server started with these words is asked for; nothing is resolved yet."""
    return parse(argv, Environment())
