"""Fidelity: how far each server's next-token distribution is from float32 transformers.

The reference continues real prompts greedily in float32. At every position of those continuations
each server is asked for one token with its best alternatives. Over the tokens that it names, with
all others taken as one, KL(reference ‖ server) is a lower bound of the full divergence; the same
number of alternatives is asked of everybody. Top-1 agreement counts equal likeliest tokens.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np

from banyan.tokenizer.load import load_tokenizer
from benchmarks.machine import PeerError
from benchmarks.peers import HERE, Model, Place, run

TOP = 20
_FLOOR = 1e-9
_CALL_S = 300.0

QUESTIONS = (
    "What is the capital of France, and which river runs through it?",
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate into German: The meeting was moved to Thursday because of the storm.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "Summarise the plot of Romeo and Juliet for a ten-year-old.",
    "List five ways in which a small office can save electricity.",
    "What is the difference between a stack and a queue? Give an example of each.",
    "Write a polite e-mail asking a landlord to repair a broken heater.",
    "If x + 3y = 10 and x - y = 2, what are x and y?",
    "Who wrote The Origin of Species, and what is its main idea?",
    "Give me a recipe for a vegetable soup that takes less than thirty minutes.",
    "SELECT name FROM users WHERE age > 30: rewrite it so that it counts the rows instead.",
    "Describe how a bill becomes law in a parliamentary democracy.",
    "What should I see in Kyoto in two days with children?",
    "Complete the sentence: The more I learned about the history of the town, the more",
)
"""Prompts as people write them."""


@dataclass(frozen=True)
class Fidelity:
    """One server against the reference.

    Attributes:
        kl_mean, kl_p99: nats; None where it does not return log-probabilities of alternatives.
        top1: share of positions with the same likeliest token.
    """

    positions: int
    top1: float
    kl_mean: float | None
    kl_p99: float | None

    def keys(self) -> dict[str, object]:
        return {
            "positions": self.positions,
            "top1": self.top1,
            "kl_mean": self.kl_mean,
            "kl_p99": self.kl_p99,
        }


@dataclass(frozen=True)
class Reference:
    """Contexts and the log-probabilities of their next token, [positions, vocab] fp32."""

    contexts: list[list[int]]
    logprobs: np.ndarray


def make_reference(place: Place, model: Model, name: str, steps: int) -> Reference:
    """Computed once per model and number of steps, then read from its file."""
    stem = place.folder / "fidelity" / f"{name}-{steps}"
    stem.parent.mkdir(parents=True, exist_ok=True)
    saved = stem.with_suffix(".npz")
    if not saved.exists():
        tokenizer = load_tokenizer(str(place.file(model.gguf)))
        asked = [tokenizer.encode(question) for question in QUESTIONS]
        prompts = stem.with_suffix(".json")
        prompts.write_text(json.dumps(asked))
        words = [
            place.python("hf"),
            str(HERE / "peer_env" / "reference.py"),
            str(place.file(model.hf)),
        ]
        run([*words, str(prompts), str(saved), str(steps)], place, "fidelity")
    with np.load(saved) as found:
        lengths, flat = found["lengths"], found["contexts"]
        contexts = [c.tolist() for c in np.split(flat, np.cumsum(lengths)[:-1])]
        return Reference(contexts, found["logprobs"])


def measure(url: str, is_native: bool, fields: dict[str, object], reference: Reference) -> Fidelity:
    """Ask a running server at every position.

    Args:
        is_native: it has /generate, whose tokens come with their ids.
        fields: added to the OpenAI form's body.
    """
    kls: list[float] = []
    agreed = 0
    with httpx.Client(timeout=_CALL_S) as client:
        for context, expected in zip(reference.contexts, reference.logprobs, strict=True):
            if is_native:
                best, scores = _native_token(client, url, context)
            else:
                best, scores = _openai_token(client, url, context, fields)
            agreed += best == int(expected.argmax())
            if len(scores) > 1:
                kls.append(divergence(expected, scores))
    return Fidelity(
        len(reference.contexts),
        agreed / len(reference.contexts),
        statistics.fmean(kls) if kls else None,
        float(np.percentile(kls, 99)) if kls else None,
    )


def divergence(expected: np.ndarray, scores: dict[int, float]) -> float:
    """KL over the named tokens and one cell for the rest, in nats."""
    ids = np.array(list(scores), dtype=np.int64)
    log_q = np.array(list(scores.values()))
    log_p = expected[ids].astype(np.float64)
    p = np.exp(log_p)
    rest_p = max(_FLOOR, 1.0 - float(p.sum()))
    rest_q = max(_FLOOR, 1.0 - float(np.exp(log_q).sum()))
    return float((p * (log_p - log_q)).sum()) + rest_p * math.log(rest_p / rest_q)


def _native_token(
    client: httpx.Client, url: str, context: Sequence[int]
) -> tuple[int, dict[int, float]]:
    """(likeliest token, log-probabilities by id)."""
    body = {
        "input_ids": context,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": TOP,
    }
    answer = _post(client, f"{url}/generate", body)
    rows = answer["meta_info"]["output_top_logprobs"][0]
    return int(answer["output_ids"][0]), {int(id): score for score, id, *_ in rows}


def _openai_token(
    client: httpx.Client, url: str, context: Sequence[int], fields: dict[str, object]
) -> tuple[int, dict[int, float]]:
    body: dict[str, object] = {"model": "m", "prompt": context, "max_tokens": 1, "logprobs": TOP}
    body |= {"temperature": 0, "ignore_eos": True, **fields}
    scores = read_scores(_post(client, f"{url}/v1/completions", body)["choices"][0]["logprobs"])
    return max(scores, key=lambda id: scores[id]), scores


def read_scores(logprobs: dict) -> dict[int, float]:
    """By token id, from {"content": [{"top_logprobs": [{"id", "logprob"}]}]} or from
    {"top_logprobs": [{"token_id:7": logprob}]}."""
    if logprobs.get("content"):
        return {t["id"]: t["logprob"] for t in logprobs["content"][0]["top_logprobs"]}
    return {
        int(name.removeprefix("token_id:")): score
        for name, score in logprobs["top_logprobs"][0].items()
    }


def _post(client: httpx.Client, url: str, body: dict[str, object]) -> dict:
    answer = client.post(url, json=body)
    if answer.status_code != 200:
        raise PeerError(f"fidelity: HTTP {answer.status_code}: {answer.text[:200]}")
    return answer.json()
