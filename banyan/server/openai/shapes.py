"""Parts of OpenAI answers that chat and completions share: usage, log-probabilities, `sglext`."""

import base64
from collections.abc import Sequence

from banyan.requests.generation import (
    Finish,
    TextChunk,
    TokenScore,
    Usage,
    cache_miss,
    cached_details,
)
from banyan.server.errors import Json
from banyan.server.openai.schema import CommonRequest
from banyan.tokenizer.tokenizer import Tokenizer


class UsageCount:
    """Token counts of one answer: each prompt once, the output of every sequence.

    Args:
        per_prompt: sequences that share a prompt.
        with_cache: report cached prompt tokens, and why there were no more (--enable-cache-report).
    """

    def __init__(self, num_sequences: int, per_prompt: int, with_cache: bool) -> None:
        self._usages = [Usage(0, 0)] * num_sequences
        self._thinking = [0] * num_sequences
        self._per_prompt = per_prompt
        self._with_cache = with_cache

    def take(self, index: int, usage: Usage, reasoning_tokens: int = 0) -> None:
        """The counts of one sequence so far; `reasoning_tokens` are part of its output."""
        self._usages[index] = usage
        self._thinking[index] = reasoning_tokens

    def of(self, index: int) -> Json:
        """Usage of one sequence, for continuous_usage_stats."""
        own = self._usages[index : index + 1]
        return self._body(own, own, self._thinking[index])

    def total(self) -> Json:
        return self._body(self._usages[:: self._per_prompt], self._usages, sum(self._thinking))

    def cached(self, store: str) -> Json:
        """Members of `sglext`: cached tokens by tier, and why there were no more."""
        prompts = self._usages[:: self._per_prompt]
        return {"cached_tokens_details": cached_details(prompts, store), **cache_miss(prompts)}

    def _body(self, prompts: Sequence[Usage], outputs: Sequence[Usage], thinking: int) -> Json:
        num_prompt = sum(u.prompt_tokens for u in prompts)
        num_output = sum(u.output_tokens for u in outputs)
        cached = {"cached_tokens": sum(u.cached_tokens for u in prompts), **cache_miss(prompts)}
        return {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_output,
            "completion_tokens": num_output,
            "prompt_tokens_details": cached if self._with_cache else None,
            "reasoning_tokens": thinking,
            "completion_tokens_details": {"reasoning_tokens": thinking} if thinking else None,
        }


def why_no_more(usage: Usage) -> Json:
    """The field `cache_miss`: why no more of the prompt was cached."""
    return cache_miss([usage])


def finish_reason(finish: Finish | None) -> str | None:
    return finish.reason if finish else None


def matched_stop(finish: Finish | None) -> int | str | None:
    return finish.matched if finish else None


def hidden_states(chunk: TextChunk) -> Json:
    """The field `hidden_states` of a choice: the last position, if it was requested."""
    return {"hidden_states": memoryview(chunk.hidden).cast("f").tolist()} if chunk.hidden else {}


class Extension:
    """The field `sglext` of an answer, complete when all sequences have ended.

    Args:
        store: backend of the hierarchical cache; "" = none.
    """

    def __init__(self, request: CommonRequest, store: str) -> None:
        self._store = store if request.return_cached_tokens_details else None
        self._members: Json = {}
        self.echoed: Json = {"metadata": request.metadata} if request.metadata else {}
        """Fields of the request that the answer repeats."""

    def take(self, chunk: TextChunk) -> None:
        if chunk.experts:
            self._members["routed_experts"] = base64.b64encode(chunk.experts).decode("ascii")

    def of(self, usage: UsageCount) -> Json:
        """The field; {} if nothing of it was requested."""
        if self._store is not None:
            self._members |= usage.cached(self._store)
        return {"sglext": self._members} if self._members else {}


def chat_logprobs(tokenizer: Tokenizer, scores: list[TokenScore], top: int) -> Json:
    """The `logprobs` object of a chat choice."""
    content = []
    for score in scores:
        best = [_token(tokenizer, id, logprob) for logprob, id in score.top[:top]]
        own = _token(tokenizer, score.token, score.logprob or 0.0)
        content.append({**own, "top_logprobs": best})
    return {"content": content}


def _token(tokenizer: Tokenizer, id: int, logprob: float) -> Json:
    piece = tokenizer.pieces[id]
    text = piece.decode("utf-8", "replace")
    return {"token": text, "bytes": list(piece), "logprob": logprob}


def completion_logprobs(tokenizer: Tokenizer, chunk: TextChunk, top: int, echo: bool) -> Json:
    """The `logprobs` object of a completion choice; `text_offset` is -1 as in SGLang."""
    scores = (chunk.prompt_scores if echo else []) + chunk.output_scores
    return {
        "text_offset": [-1] * len(scores),
        "token_logprobs": [s.logprob for s in scores],
        "tokens": [_text(tokenizer, s.token) for s in scores],
        "top_logprobs": [
            {_text(tokenizer, id): logprob for logprob, id in s.top[:top]} if s.top else None
            for s in scores
        ],
    }


def _text(tokenizer: Tokenizer, id: int) -> str:
    """The text of a token; "bytes:" and its bytes in hexadecimal for a part of a character."""
    piece = tokenizer.pieces[id]
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
