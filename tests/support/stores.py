"""Servers that keep pages in a store."""

from pathlib import Path

from tests.system.serving import Server

PROMPT = [i * 7 % 400 + 5 for i in range(900)]

OTHER = [i * 11 % 400 + 5 for i in range(900)]

KEPT = 896
"""Tokens of PROMPT in whole pages, the last token left out."""

WAIT_S = 60.0


def output_of(found: dict) -> dict[str, object]:
    """Tokens and log-probabilities, bit for bit."""
    return {"ids": found["output_ids"], "scores": found["meta_info"]["output_token_logprobs"]}


def stored_tokens(found: dict) -> int:
    return found["meta_info"]["cached_tokens_details"]["storage"]


def pages(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.page"))


def http_ask(server: Server, prompt: list[int] = PROMPT, **fields: object) -> dict:
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return server.generate(input_ids=prompt, sampling_params=params, return_logprob=True, **fields)
