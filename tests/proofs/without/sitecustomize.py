"""Takes one flag's effect away: what is given for $WITHOUT_FLAG is read, checked and forgotten.

Python imports this module at the start of every process that finds its folder on PYTHONPATH, so it
holds for a test and for all that the test starts. It acts where flags become a Config.
"""

import os

import banyan.config.cli as cli
from banyan.config.flags.flag import Flag
from banyan.config.flags.table import CONFIG_FILE

gone = os.environ["WITHOUT_FLAG"]
put = cli._Layer.put


def put_the_others(layer: cli._Layer, flag: Flag, value: object, spelled: str) -> None:
    if flag.name != gone:
        put(layer, flag, value, spelled)


cli._Layer.put = put_the_others  # type: ignore[method-assign]
if gone == CONFIG_FILE:
    cli.read_mapping = lambda path, flag: {}
