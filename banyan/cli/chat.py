"""`banyan chat [MODEL]`: talk to a model in the terminal, on a running server or a private one."""

import argparse
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from banyan.base.errors import BanyanError, ConfigError
from banyan.cli.client import Client, Refused
from banyan.cli.private import private_server
from banyan.cli.terminal import Terminal
from banyan.config.env import read_environment
from banyan.config.schema import DEMO, DEMO_LINE

_COMMANDS = "/reset forgets the talk so far, /quit leaves, Ctrl-C stops an answer"
_IS_FULL = "context_length_exceeded"
Message = dict[str, str]


def chat(argv: Sequence[str]) -> int:
    """Talk until the user leaves; returns the exit code."""
    options, rest = _parser().parse_known_args(list(argv))
    settings: dict[str, object] = {}
    if options.model_name:
        settings["model"] = options.model_name
    if options.max_tokens is not None:
        settings["max_tokens"] = options.max_tokens
    if options.temperature is not None:
        settings["temperature"] = options.temperature
    given = options.api_key or read_environment().flags.get("api-key", "")
    key = given.partition(" ")[0]  # a server may have several; one is enough to call it
    if options.url:
        if rest:
            raise ConfigError(f"{rest[0]} goes to a server, but --url names one that runs already")
        return talk(Client(options.url, key), settings, options.system)
    terminal = Terminal()
    terminal.say("starting a server …")
    with private_server(rest) as client:
        return talk(client, settings, options.system, terminal)


def talk(
    client: Client, settings: dict[str, object], system: str, terminal: Terminal | None = None
) -> int:
    """The conversation: read a question, stream the answer, until end of input or two Ctrl-C.

    Returns:
        0; where questions come from another program, the code of the first one that failed.

    Raises:
        BanyanError: the server cannot be reached, or lets nobody in.
    """
    terminal = terminal or Terminal()
    served = client.served()
    context = f", {served.context:,} tokens of context" if served.context else ""
    terminal.say(f"{served.model or 'a model'} at {client.url}{context}. {_COMMANDS}")
    if served.model == DEMO:
        terminal.say(DEMO_LINE)
    settings = {"model": served.model or "default", **settings}
    conversation = _Talk(client, settings, system, terminal)
    code = 0
    was_interrupted = False
    while True:
        try:
            line = terminal.read()
        except EOFError:
            break
        except KeyboardInterrupt:
            if was_interrupted:
                break
            was_interrupted = True
            terminal.say("\n(Ctrl-C again to leave)")
            continue
        was_interrupted = False
        if line in ("/quit", "/exit", "/bye"):
            break
        failure = conversation.take(line)
        code = code or failure
    return 0 if terminal.is_person else code


class _Talk:
    """What was said, and what becomes of the next line."""

    def __init__(
        self, client: Client, settings: dict[str, object], system: str, terminal: Terminal
    ) -> None:
        self._client = client
        self._settings = settings
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._turns: list[Message] = []
        self._terminal = terminal

    def take(self, line: str) -> int:
        """Obey a command or ask a question; 0, or the exit code of what failed."""
        if line == "/reset":
            self._turns = []
        elif line == "/help":
            self._terminal.say(_COMMANDS)
        elif line.startswith("/"):
            word = line.split(maxsplit=1)[0]
            self._terminal.say(f"unknown command {word}; /help lists them; a space asks it as text")
            return ConfigError.exit_code
        elif question := line.strip():
            return self._ask(question)
        return 0

    def _ask(self, question: str) -> int:
        self._turns.append({"role": "user", "content": question})
        forgotten = 0
        while True:
            try:
                answer = self._show_answer()
            except BanyanError as error:
                is_full = isinstance(error, Refused) and error.code == _IS_FULL
                if is_full and len(self._turns) > 1:
                    del self._turns[:2]  # the oldest question and its answer
                    forgotten += 1
                    continue
                self._terminal.say(f"\n{error}")
                self._turns.pop()
                return error.exit_code
            break
        if forgotten:
            self._terminal.say(
                f"[the talk is longer than the model's context: its oldest {forgotten} questions "
                "and answers are forgotten; /reset forgets all]"
            )
        if answer:
            self._turns.append({"role": "assistant", "content": answer})
        else:
            self._turns.pop()
        return 0

    def _show_answer(self) -> str:
        """What was said, up to a Ctrl-C."""
        body = {**self._settings, "messages": [*self._opening, *self._turns]}
        said: list[str] = []
        pace = _Pace()
        finish = ""
        with closing(self._client.answer(body)) as pieces:
            try:
                for piece in pieces:
                    self._terminal.show_thought(piece.thought)
                    if piece.text:
                        said.append(piece.text)
                        self._terminal.show(piece.text)
                        pace.mark()
                    finish = piece.finish or finish
                    pace.tokens = piece.tokens or pace.tokens
            except KeyboardInterrupt:
                finish = "interrupt"
        self._terminal.show("\n")
        if finish == "length":
            length = f"after {pace.tokens:,} tokens" if pace.tokens else "at its limit"
            self._terminal.say(f"[cut {length}; --max-tokens sets the limit, /reset makes room]")
        elif finish == "interrupt":
            self._terminal.say("[stopped]")
        elif self._terminal.is_person and pace.tokens:
            self._terminal.say(pace.text())
        return "".join(said)


@dataclass
class _Pace:
    """Speed of an answer as seen by the client."""

    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    def mark(self) -> None:
        """Record that a piece has arrived."""
        self.last_s = time.monotonic()
        self.first_s = self.first_s or self.last_s

    def text(self) -> str:
        spent_s = self.last_s - self.first_s
        speed = f", {(self.tokens - 1) / spent_s:.1f} tokens/s" if spent_s > 0 else ""
        return f"[{self.tokens:,} tokens{speed}]"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="banyan chat",
        usage="banyan chat [MODEL] [flags]",
        allow_abbrev=False,
        description=f"Talk to a model. {_COMMANDS}.",
        epilog="MODEL and every other flag go to the private server; see banyan serve --help.",
    )
    parser.add_argument("--url", default="", help="a server that runs already: http://host:port")
    parser.add_argument("--api-key", default="", help="its key (or BANYAN_API_KEY)")
    parser.add_argument("--model-name", default="", help="model to ask for; default: its first")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--max-tokens", type=int, help="longest answer in tokens")
    parser.add_argument("--temperature", type=float, help="0 = always the likeliest token")
    return parser
