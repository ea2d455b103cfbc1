"""A whole server process around a scripted engine; run by test_serve.

Arguments: port, model folder, drain time in seconds, how often in a row an engine is started again,
and for how many seconds it has to serve for that to be forgotten. The engine says "a" at a steady
pace, until max_new_tokens; a request for DEADLY_TOKENS kills it. By the name of the folder the
engine never becomes ready ("late"), the model is never found ("slow") or is refused ("broken"), or
a thread is busy for ever with a text ("busy"), or for ever in native code that keeps the
interpreter's lock ("stuck"), or the engine never stops ("deaf").
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

from banyan.base.errors import ModelError
from banyan.base.log import start_logging
from banyan.config.schema import Config, LoadConfig, ServerConfig
from banyan.messages.events import Event, Finished, Ready, Stats, Tokens
from banyan.messages.requests import Abort, Generate
from banyan.messages.transport import SocketEngineLink
from banyan.model_config.model_config import ModelConfig
from banyan.server.lifecycle import serve, startup
from banyan.server.lifecycle.serve import run_server
from tests.server.fakes import MODEL_CONFIG

PACE_S = 0.01
DEADLY_TOKENS = 777


@dataclass
class ScriptedEngine:
    """Runs in a thread; implements the EngineHandle of run_server."""

    address: str
    on_death: Callable[[str], None]
    trouble: str

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self.trouble == "deaf":
            threading.Event().wait()
        self._stopping.set()
        self._thread.join()

    put_down = stop

    def recording(self) -> bytes:
        return b""

    def _run(self) -> None:
        link = SocketEngineLink(self.address)
        if self.trouble != "late":
            link.send([Ready(8192, 4096, 8, b'{"phases": {"weights": 0.001}}')])
        live: dict[str, tuple[Generate, int]] = {}
        while not self._stopping.is_set():
            select.select([link.poll_fd()], [], [], PACE_S)
            events: list[Event] = [Stats()]
            for message in link.receive():
                if isinstance(message, Generate):
                    live[message.request] = (message, 0)
                elif isinstance(message, Abort) and message.request in live:
                    asked, count = live.pop(message.request)
                    events.append(_end(asked, count, "abort"))
            for name, (asked, count) in list(live.items()):
                if asked.sampling.max_new_tokens == DEADLY_TOKENS:
                    self.on_death("engine (pid 1) was killed by SIGKILL")
                    return
                letter = array("i", [64]).tobytes()
                events.append(Tokens(asked.request, count, letter))
                live[name] = (asked, count + 1)
                if count + 1 >= asked.sampling.max_new_tokens:
                    events.append(_end(asked, count + 1, "length"))
                    del live[name]
            link.send(events)
            time.sleep(PACE_S)
        link.close()


def _end(asked: Generate, count: int, reason: str) -> Finished:
    return Finished(asked.request, reason, len(asked.tokens) // 4, count, 0)


def ending(folder: str) -> str:
    return folder.rpartition("/")[2]


def busy_for_ever(config: Config) -> None:
    """A text that is never read."""
    threading.Event().wait()


def keep_the_lock() -> None:
    """Read what nobody writes, in a call that does not give the interpreter's lock away."""
    reader, _ = os.pipe()
    print("stuck", file=sys.stderr, flush=True)
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)


def main() -> int:
    port, folder, drain_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    restarts, proof_s = int(sys.argv[4]), float(sys.argv[5])
    start_logging("server")
    config = Config(
        model=LoadConfig(source="tiny", path=folder, tokenizer_path=folder),
        server=ServerConfig(
            port=port, drain_timeout_s=drain_s, engine_restarts=restarts, engine_proof_s=proof_s
        ),
    )

    if folder.endswith("busy"):
        startup._load_tokenizer = busy_for_ever

    if folder.endswith("stuck"):
        serve.STUCK = signal.SIGQUIT  # number 3
    if folder.endswith("deaf"):
        serve.LEAVING_S = 1.0

    def prepare() -> tuple[Config, ModelConfig]:
        if folder.endswith("slow"):
            threading.Event().wait()
        if folder.endswith("stuck"):
            keep_the_lock()
        if folder.endswith("broken"):
            raise ModelError("the model cannot be read")
        return config, replace(MODEL_CONFIG, path=folder)

    try:
        return run_server(
            config,
            prepare,
            lambda _, model_config, link, on_death: ScriptedEngine(link, on_death, ending(folder)),
        )
    except ModelError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
