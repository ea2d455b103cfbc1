"""`banyan chat [MODEL]`: talk to a model in the terminal, on a running server or a private one."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing

from banyan.base.errors import BanyanError, ConfigError
from banyan.cli.client import Client
from banyan.cli.private import private_server
from banyan.config.env import read_environment

_COMMANDS = "/reset forgets the talk so far, /quit leaves, Ctrl-C stops an answer"


def chat(argv: Sequence[str]) -> int:
    """Talk until the user leaves; returns the exit code."""
    options, rest = _parser().parse_known_args(list(argv))
    settings: dict[str, object] = {"model": options.model_name}
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
    print("starting a server …", file=sys.stderr)
    with private_server(rest) as client:
        return talk(client, settings, options.system)


def talk(client: Client, settings: dict[str, object], system: str) -> int:
    """The conversation: read a line, stream the answer, until end of input or two Ctrl-C."""
    print(_COMMANDS, file=sys.stderr)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    was_interrupted = False
    while True:
        try:
            line = _read_line()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            if was_interrupted:
                return 0
            was_interrupted = True
            print("\n(Ctrl-C again to leave)", file=sys.stderr)
            continue
        was_interrupted = False
        if line in ("/quit", "/exit"):
            return 0
        if line == "/reset":
            messages = list(opening)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer, was_interrupted = _show_answer(client, {**settings, "messages": messages})
        except BanyanError as error:
            print(f"\n{error}", file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def _show_answer(client: Client, body: dict[str, object]) -> tuple[str, bool]:
    """(what was said, was it interrupted)."""
    said: list[str] = []
    was_interrupted = False
    with closing(client.answer(body)) as pieces:
        try:
            for piece in pieces:
                said.append(piece)
                print(_inert(piece), end="", flush=True)
        except KeyboardInterrupt:
            was_interrupted = True
    print(flush=True)
    return "".join(said), was_interrupted


def _inert(text: str) -> str:
    """Without the control characters that could drive the terminal."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def _read_line() -> str:
    return input("> " if sys.stdin.isatty() else "").strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="banyan chat",
        allow_abbrev=False,
        description=f"Talk to a model. {_COMMANDS}.",
        epilog="MODEL and every other flag go to the private server; see banyan serve --help.",
    )
    parser.add_argument("--url", default="", help="a server that runs already: http://host:port")
    parser.add_argument("--api-key", default="", help="its key (or BANYAN_API_KEY)")
    parser.add_argument("--model-name", default="default", help="model name in the requests")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--max-tokens", type=int, help="longest answer in tokens")
    parser.add_argument("--temperature", type=float, help="0 = always the likeliest token")
    return parser
