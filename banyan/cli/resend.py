"""Send the requests of a journal to a server again, at their original times."""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from banyan.base.errors import BanyanError, ModelError
from banyan.cli.client import Client
from banyan.engine.journal import JournalRecord, Received, read_journal
from banyan.messages.requests import Abort, Constraint, Generate, StopAt

_MOST_OPEN = 256
"""Most requests open at once."""
_INT63 = (1 << 63) - 1


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
    if asked.embeds:
        return "its prompt is embeddings"
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
