"""A function of the operator's own for SIGQUIT, as SGLang calls it: on the signal, and when the
server is about to end because its engines stay lost. What it does is its own affair.
"""

import signal
from types import FrameType

from banyan.base.log import logger, printable
from banyan.base.named_code import load_named

log = logger(__name__)


def hear_sigquit(name: str, checkpoint: str) -> None:
    """From here on SIGQUIT calls the function with the signal's number and the frame, in the main
    thread; a fault of it is logged.

    Raises:
        ConfigError: there is no such function, or it lies with the checkpoint.
    """
    handler = load_named("--custom-sigquit-handler", name, checkpoint)

    def call(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except Exception:
            log.exception("--custom-sigquit-handler %s failed", printable(name))

    signal.signal(signal.SIGQUIT, call)
