"""`banyan run MODEL "prompt"`: one answer in the terminal, from a private server."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing

from banyan.base.errors import ConfigError, ModelError
from banyan.cli.client import Client
from banyan.cli.private import private_server
from banyan.cli.terminal import Terminal
from banyan.config.schema import DEMO, DEMO_LINE
from banyan.hub.catalogue import find

_USAGE = 'banyan run MODEL ["prompt"] [flags]'
_MAX_PROMPT = 1 << 20
"""Characters that are read from standard input."""
_INTERRUPTED = 130


def run(argv: Sequence[str]) -> int:
    """Answer one prompt; returns the exit code. Without a prompt standard input is one, and at a
    terminal a talk begins."""
    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        _parser().print_help()
        return 0 if words else ConfigError.exit_code
    if words[0].startswith("-"):
        raise ConfigError("the model comes first", hint=_USAGE)
    model = words.pop(0)
    known = find(model)
    if known is not None and known.kind == "embedding":
        raise ModelError(
            f"{known.name} makes vectors of texts and answers nothing",
            hint=f"banyan serve {known.name}, then POST /v1/embeddings",
        )
    prompt = words.pop(0) if words and not words[0].startswith("-") else ""
    if not prompt and sys.stdin.isatty():
        from banyan.cli.chat import chat

        return chat([model, *words])
    options, rest = _parser().parse_known_args(words)
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


def _parser() -> argparse.ArgumentParser:
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
