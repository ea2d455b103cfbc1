"""`banyan chat` and `banyan run`: a talk, or one answer, in the terminal."""

import argparse
import importlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from banyan.base.errors import BanyanError, ConfigError, ModelError
from banyan.bench.options import CACERT
from banyan.cli.client import Client, Refused, private_server
from banyan.config.env import read_environment
from banyan.config.schema import DEMO, DEMO_LINE
from banyan.hub.catalogue import find

_COMMANDS = "/reset forgets the talk so far, /quit leaves, Ctrl-C stops an answer"
_IS_FULL = "context_length_exceeded"
Message = dict[str, str]
_USAGE = 'banyan run MODEL ["prompt"] [flags]'
_MAX_PROMPT = 1 << 20
"""Characters that are read from standard input."""
_INTERRUPTED = 130
_PROMPT = "> "
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_NOTICED_WITHIN_S = 0.2
"""How long a Ctrl-C may stay unseen while a line is typed."""


class Terminal:
    """Standard input and output of a talk.

    Where Python has GNU readline, lines are edited, arrows bring back earlier ones, and a pasted
    text of several lines is one question (bracketed paste).
    """

    def __init__(self) -> None:
        self.is_person = sys.stdin.isatty()
        """False = questions come from a file or another program."""
        self._is_thinking = False
        if self.is_person:
            _edit_lines()

    def read(self) -> str:
        """The next question or command, its ends as they were typed.

        Raises:
            EOFError, KeyboardInterrupt: as the person pressed.
        """
        if not self.is_person:
            return input()
        with _signals_noticed():
            return input(_PROMPT)

    def say(self, text: str) -> None:
        """Print a line about the chat to standard error."""
        print(text, file=sys.stderr, flush=True)

    def show(self, piece: str) -> None:
        """A piece of an answer, without the control characters that could drive the terminal."""
        if self._is_thinking and piece:
            self._is_thinking = False
            self.say(_PLAIN)
        print(_inert(piece), end="", flush=True)

    def show_thought(self, piece: str) -> None:
        """What a model says to itself: dim, and to people only; never on standard output."""
        if piece and sys.stderr.isatty():
            begun = "" if self._is_thinking else _DIM
            self._is_thinking = True
            print(begun + _inert(piece), end="", file=sys.stderr, flush=True)


@contextmanager
def _signals_noticed() -> Iterator[None]:
    """Wake a wait for keys now and then, that it looks for signals.

    Python's readline waits in select(): a Ctrl-C that comes between two such waits interrupts
    none, and would be seen only after the line, which it then throws away.
    """
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, _NOTICED_WITHIN_S, _NOTICED_WITHIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _inert(text: str) -> str:
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def _edit_lines() -> None:
    try:
        readline = importlib.import_module("readline")
    except ImportError:
        return  # a Python without it: lines come as the terminal gives them
    readline.parse_and_bind("set enable-bracketed-paste on")


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
        return talk(Client(options.url, key, options.cacert), settings, options.system)
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
    parser.add_argument("--cacert", default="", help=CACERT)
    parser.add_argument("--model-name", default="", help="model to ask for; default: its first")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--max-tokens", type=int, help="longest answer in tokens")
    parser.add_argument("--temperature", type=float, help="0 = always the likeliest token")
    return parser


def run(argv: Sequence[str]) -> int:
    """Answer one prompt; returns the exit code. Without a prompt standard input is one, and at a
    terminal a talk begins."""
    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        _run_parser().print_help()
        return 0 if words else ConfigError.exit_code
    if words[0].startswith("-"):
        raise ConfigError("the model comes first", hint=_USAGE)
    model = words.pop(0)
    known = find(model)
    if known is not None and known.kind == "embedding":
        raise ModelError(
            f"{known.name} makes vectors of texts and answers nothing",
            hint=f"run banyan serve {known.name}, then POST /v1/embeddings",
        )
    prompt = words.pop(0) if words and not words[0].startswith("-") else ""
    if not prompt and sys.stdin.isatty():
        return chat([model, *words])
    options, rest = _run_parser().parse_known_args(words)
    prompt = prompt or _read_prompt()
    if model == DEMO:
        print(DEMO_LINE, file=sys.stderr)
    with private_server([model, *rest]) as client:
        return _answer(client, _request(prompt, options))


def _read_prompt() -> str:
    text = sys.stdin.read(_MAX_PROMPT + 1)
    if len(text) > _MAX_PROMPT:
        raise ConfigError(f"standard input has more than {_MAX_PROMPT:,} characters")
    if not text.strip():
        raise ConfigError("there is no prompt", hint=_USAGE)
    return text


def _request(prompt: str, options: argparse.Namespace) -> dict[str, object]:
    opening = [{"role": "system", "content": options.system}] if options.system else []
    body: dict[str, object] = {
        "model": "default",
        "messages": [*opening, {"role": "user", "content": prompt}],
    }
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    if options.temperature is not None:
        body["temperature"] = options.temperature
    return body


def _answer(client: Client, body: dict[str, object]) -> int:
    terminal = Terminal()
    finish, tokens = "", 0
    with closing(client.answer(body)) as pieces:
        try:
            for piece in pieces:
                terminal.show_thought(piece.thought)
                terminal.show(piece.text)
                finish, tokens = piece.finish or finish, piece.tokens or tokens
        except KeyboardInterrupt:
            terminal.show("\n")
            return _INTERRUPTED
    terminal.show("\n")
    if finish == "length":
        terminal.say(f"[cut after {tokens:,} tokens; --max-tokens sets the limit]")
    return 0


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="banyan run",
        usage=_USAGE,
        allow_abbrev=False,
        description="One answer in the terminal. Without a prompt standard input is one; at a "
        "terminal a talk begins.",
        epilog="Every other flag goes to the private server; see banyan serve --help.",
    )
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--max-tokens", type=int, help="longest answer in tokens")
    parser.add_argument("--temperature", type=float, help="0 = always the likeliest token")
    return parser
