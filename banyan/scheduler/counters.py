"""Counters, kept where the state lives; exported elsewhere. They never go down."""

from dataclasses import dataclass


@dataclass
class Counters:
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    stored_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    retractions: int = 0
    finished: int = 0
    failed: int = 0
