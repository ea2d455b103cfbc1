"""Requests of all kinds, and engines that answer them with and without drafts."""

from pathlib import Path

from banyan.llm import Engine

REPEATS = "One two three four five six. " * 4 + "One two"
LONG = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}

REQUESTS: dict[str, dict[str, object]] = {
    "greedy": {},
    "drawn": {"sampling_params": LONG | {"temperature": 0.7, "sampling_seed": 5}},
    "filtered": {
        "sampling_params": LONG
        | {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "sampling_seed": 6}
    },
    "penalised": {
        "sampling_params": LONG
        | {"frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.2}
    },
    "biased": {"sampling_params": LONG | {"logit_bias": {"7": 3.0, "11": -4.0}}},
    "at least": {"sampling_params": LONG | {"ignore_eos": False, "min_new_tokens": 40}},
    "stopped": {"sampling_params": LONG | {"stop": ["e t", "qu", "an"]}},
    "stopped by a token": {"sampling_params": LONG | {"stop_token_ids": list(range(60, 90))}},
    "scored": {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3},
    "regex": {"sampling_params": LONG | {"ignore_eos": False, "regex": "(one |two |three )+end"}},
    "schema": {
        "sampling_params": LONG
        | {
            "ignore_eos": False,
            "json_schema": '{"type":"object","properties":{"a_long_name":{"type":"integer"},'
            '"another_long_name":{"type":"boolean"}},'
            '"required":["a_long_name","another_long_name"]}',
        }
    },
    "several": {"sampling_params": LONG | {"n": 3, "temperature": 0.9, "sampling_seed": 8}},
    "one token": {"sampling_params": LONG | {"max_new_tokens": 1}},
}


def start(model: Path, is_drafting: bool = True, **flags: object) -> Engine:
    if is_drafting:
        flags |= {"speculative_algorithm": "NGRAM", "disable_adaptive_drafts": True}
    known = {"threads": 1, "max_total_tokens": 4096, "log_level": "error", "check_ledger": True}
    # Backends jump differently, and on a busy machine two engines may not end up with the same one.
    known["grammar_backend"] = "llguidance"
    if not set(flags) & {"tp_size", "pp_size", "dp_size", "attn_cp_size"}:
        known["engine_mode"] = "inprocess"  # another process takes two seconds to begin
    return Engine(model_path=str(model), **(known | flags))


def answers(engine: Engine, **body: object) -> list[dict]:
    found = engine.generate(**({"prompt": REPEATS, "sampling_params": LONG} | body))
    return found if isinstance(found, list) else [found]


def output_of(answer: dict) -> object:
    """What of an answer must not depend on drafts."""
    meta = answer["meta_info"]
    scores = {key: meta[key] for key in meta if "logprob" in key}
    return answer["text"], answer["output_ids"], meta["finish_reason"], scores
