"""Requests to a pair of engines, and the parts of an answer that must be equal."""

import json

from banyan.llm import Engine

PROMPT = [i * 7 % 400 + 5 for i in range(300)]

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})


def output_of(found: dict) -> dict[str, object]:
    """Tokens and log-probabilities, bit for bit, and why it ended."""
    meta = found["meta_info"]
    names = ("output_token_logprobs", "input_token_logprobs", "output_top_logprobs")
    scores = {name: meta.get(name) for name in names}
    return {"ids": found["output_ids"], "end": meta["finish_reason"], **scores}


def is_whole(engine: Engine) -> bool:
    """Every page is free or cached, and no request is left."""
    (state,) = engine.get_server_info()["internal_states"]
    stats = state["stats"]
    is_idle = not stats["running"] and not stats["waiting"] and not stats["held_pages"]
    is_idle = is_idle and not stats["open_rooms"]
    return is_idle and stats["free_pages"] + stats["cached_pages"] == stats["total_pages"]


CASES = {
    "greedy": {"sampling_params": GREEDY},
    "scores": {"sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2},
    "scores of the prompt": {
        "sampling_params": GREEDY,
        "return_logprob": True,
        "logprob_start_len": 0,
    },
    "seeded": {
        "sampling_params": {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 12},
        "return_logprob": True,
    },
    "penalties": {
        "sampling_params": {**GREEDY, "frequency_penalty": 1.0, "repetition_penalty": 1.3}
    },
    "a schema": {"sampling_params": {**GREEDY, "max_new_tokens": 24, "json_schema": SCHEMA}},
    "one token": {"sampling_params": {**GREEDY, "max_new_tokens": 1}, "return_logprob": True},
    "no token": {"sampling_params": {**GREEDY, "max_new_tokens": 0}},
    "a stop text": {"sampling_params": {**GREEDY, "max_new_tokens": 40, "stop": ["e"]}},
    "several": {"sampling_params": {"temperature": 1.0, "sampling_seed": 3, "n": 3}},
}
