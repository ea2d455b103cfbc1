"""Commands over recorded requests, from a journal or a flight recorder.

- `banyan replay FILE`: make every plan again with this build's scheduler and compare, or send the
  requests to a server again. Constrained requests need the vocabulary of the model: MODEL and the
  flags of the recorded server follow FILE.
- `banyan explain REQUEST`: what happened to one request.
- `banyan cache explain REQUEST`: only what it found in the prefix cache.
"""

import argparse
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from banyan.base.errors import BanyanError, ConfigError, ModelError
from banyan.bench.options import CACERT
from banyan.cli.client import Client
from banyan.config.env import read_environment
from banyan.engine.journal import JournalRecord, Received, read_journal
from banyan.grammar.base import GrammarFactory
from banyan.messages.requests import Abort, Constraint, Generate, StopAt

if TYPE_CHECKING:  # a replay needs more than the flags
    from banyan.sim.explain import Explanation

_MOST_OPEN = 256
"""Most requests open at once."""
_INT63 = (1 << 63) - 1


def replay(argv: Sequence[str]) -> int:
    """0 when every plan is reproduced, or every request answered; else 1."""
    parser = argparse.ArgumentParser(
        prog="banyan replay",
        allow_abbrev=False,
        epilog="What follows FILE is as for the server that recorded: banyan replay FILE MODEL "
        "--grammar-backend NAME. It is needed where requests were constrained.",
    )
    parser.add_argument("file", help="journal, or what a flight recorder held")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare every plan (the default)")
    what.add_argument(
        "--serve", metavar="URL", help="send the requests to this server, as they came"
    )
    parser.add_argument("--api-key", default="", help="for --serve; default: $BANYAN_API_KEY")
    parser.add_argument("--cacert", default="", help=f"for --serve: {CACERT}")
    options, served = parser.parse_known_args(list(argv))
    if options.serve:
        if served:
            parser.error(f"with --serve there is no {served[0]}")
        key = options.api_key or read_environment().flags.get("api-key", "")
        resent = resend(options.file, Client(options.serve, key, options.cacert))
        print(resent)
        return 0 if resent.answered == resent.sent else 1
    from banyan.sim.replay import check

    with _grammars(served) as grammars:
        report = check(options.file, grammars)
    print(report)
    return 0 if report.ok else 1


@contextmanager
def _grammars(served: Sequence[str]) -> Iterator[GrammarFactory | None]:
    """What compiled the constraints of the server with these flags; None where there are none."""
    if not served:
        yield None
        return
    from banyan.config.cli import parse
    from banyan.config.prepare import prepare
    from banyan.engine.grammar_queue import open_grammars

    environment = read_environment()
    config, model_config = prepare(parse(served, environment), environment)
    compiler = open_grammars(config, model_config)
    try:
        yield compiler
    finally:
        if compiler is not None:
            compiler.close()


@dataclass(frozen=True)
class Sending:
    """One thing to send.

    Attributes:
        after_s: seconds after the first one.
        body: body of POST `route`.
    """

    after_s: float
    route: str
    body: dict[str, object]


@dataclass
class Resent:
    """Results of a resend."""

    sent: int = 0
    answered: int = 0
    latest_s: float = 0.0
    """Largest delay of a request."""
    failures: Counter[str] = field(default_factory=Counter[str])
    left_out: Counter[str] = field(default_factory=Counter[str])

    def __str__(self) -> str:
        lines = [
            f"{self.answered} of {self.sent} requests were answered; none was sent more than "
            f"{self.latest_s:.3f} s after it was due"
        ]
        lines += [f"{count} failed: {why}" for why, count in self.failures.most_common()]
        lines += [f"{count} left out: {why}" for why, count in self.left_out.most_common()]
        return "\n".join(lines)


def resend(path: str, client: Client, sleep: Callable[[float], None] = time.sleep) -> Resent:
    """Send the requests of the journal at `path` and wait for all answers.

    Raises:
        ModelError: no journal, or none with a request that can be sent.
    """
    _, records = read_journal(path)
    result = Resent()
    sendings = list(to_send(list(records), result.left_out))
    if not sendings:
        raise ModelError(f"{path!r} has no request that can be sent again")

    def post(sending: Sending) -> None:
        is_request = sending.route == "/generate"
        try:
            client.post(sending.route, sending.body)
        except BanyanError as error:
            if is_request:
                result.failures[str(error)[:200]] += 1
        else:
            result.answered += is_request

    began_s = time.monotonic()
    with ThreadPoolExecutor(_MOST_OPEN) as pool:
        for sending in sendings:
            due_s = began_s + sending.after_s
            sleep(max(0.0, due_s - time.monotonic()))
            result.latest_s = max(result.latest_s, time.monotonic() - due_s)
            result.sent += sending.route == "/generate"
            pool.submit(post, sending)
    return result


def to_send(records: list[JournalRecord], left_out: Counter[str]) -> Iterator[Sending]:
    """The requests and aborts of the records, as calls of the native API.

    Args:
        left_out: counts requests that the API cannot express, by reason.
    """
    received = [record for record in records if isinstance(record, Received)]
    stops = {
        record.message.request: record.message.length
        for record in received
        if isinstance(record.message, StopAt)
    }
    first_s: float | None = None
    prefix = f"again-{time.time_ns():x}-"
    names: dict[str, str] = {}
    for record in received:
        match record.message:
            case Generate() as asked:
                if why := _objection(asked):
                    left_out[why] += 1
                    continue
                names[asked.request] = name = f"{prefix}{len(names)}"
                body = _body(asked, stops.get(asked.request)) | {"rid": name}
                first_s = record.now if first_s is None else first_s
                yield Sending(record.now - first_s, "/generate", body)
            case Abort(request) if request in names and first_s is not None:
                yield Sending(record.now - first_s, "/abort_request", {"rid": names[request]})
            case _:
                pass


def _objection(asked: Generate) -> str:
    if asked.grammar and Constraint.decode(asked.grammar).after:
        return "its constraint begins after the thinking, which /generate has no words for"
    if asked.spans:
        return "its prompt has contents, which a recording leaves out"
    if asked.pool:
        return "it asks for a vector"
    if asked.transfer_id:
        return "it was handed over between servers"
    if asked.sampling.processor:
        return "it has a logit processor"
    return ""


def _body(asked: Generate, stop_at: int | None) -> dict[str, object]:
    sampling = asked.sampling
    params = msgspec.to_builtins(sampling)
    params |= {"sampling_seed": params.pop("seed", 0) & _INT63}
    params["stop_token_ids"] = list(params.pop("stop_ids", ()))
    if "logit_bias" in params:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if stop_at is not None:  # a stop text was found there
        params["max_new_tokens"] = stop_at
        params["min_new_tokens"] = min(sampling.min_new_tokens, stop_at)
    if asked.grammar:
        constraint = Constraint.decode(asked.grammar)
        params[constraint.kind] = constraint.text
    body: dict[str, object] = {
        "input_ids": array("i", asked.tokens).tolist(),
        "sampling_params": params,
    }
    if asked.namespace:
        body["extra_key"] = asked.namespace.hex()
    if asked.adapter:
        body["lora_path"] = asked.adapter
    if asked.priority:
        body["priority"] = asked.priority
    if asked.score_from >= 0:
        body |= {"return_logprob": True, "logprob_start_len": asked.score_from}
        body |= {"top_logprobs_num": asked.score_top} if asked.score_top else {}
    return body


def explain(argv: Sequence[str]) -> int:
    """What became of a request."""
    about = "Why a request waited, what it found in the cache, where its time went."
    print(_explained("banyan explain", about, argv))
    return 0


def cache(argv: Sequence[str]) -> int:
    """What it found in the prefix cache."""
    if not argv or argv[0] not in ("explain", "-h", "--help"):
        given = " ".join(["banyan cache", *argv[:1]])
        raise ConfigError(f"{given!r} is no command", hint="use: banyan cache explain REQUEST")
    about = "What a request found in the prefix cache, why no more, and what would help."
    words = argv[1:] if argv[0] == "explain" else argv
    print(_explained("banyan cache explain", about, words).of_the_cache)
    return 0


def _explained(verb: str, about: str, argv: Sequence[str]) -> "Explanation":
    """Ask a running server for its recording, or take a file, and look into it here."""
    parser = argparse.ArgumentParser(verb, description=about, allow_abbrev=False)
    parser.add_argument("request", help="its id, as answers, /requests and the log say it")
    parser.add_argument("--file", default="", help="a dumped recording or journal, and no server")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--dp-rank", type=int, default=0, help="which replica had it (default: 0)")
    parser.add_argument("--api-key", default="", help="default: $BANYAN_ADMIN_API_KEY")
    parser.add_argument("--cacert", default="", help=CACERT)
    options = parser.parse_args(list(argv))
    from banyan.sim.explain import explain

    if options.file:
        return explain(options.file, options.request)
    flags = read_environment().flags
    key = options.api_key or flags.get("admin-api-key", "") or flags.get("api-key", "")
    client = Client(options.url, key, options.cacert)
    content = client.download(f"/flight_recorder?dp_rank={options.dp_rank}")
    with tempfile.TemporaryDirectory(prefix="banyan-explain-") as folder:
        path = Path(folder) / "recording"  # nobody else reads what lies in such a folder
        path.write_bytes(content)
        return explain(str(path), options.request)
