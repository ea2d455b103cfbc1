"""Abilities: which words of messages/plan.py a runner carries out. An engine plans no others."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Abilities:
    """
    Attributes:
        groups: kinds of cache groups.
        copies: pages are copied before and after the rows.
        tiers: between which of them (PageAt.tier).
        drafts: rows may bring drafts to verify.
        goes_back: a state goes back behind drafts that do not stand.
        peers: a step may be agreed with other replicas, also one without rows.
        adapters: a join may name one.
        text: rows sample and score.
        vectors: rows are pooled.
        hidden: rows report their hidden states.
        bursts: a plan may hold several decode steps.
    """

    groups: tuple[str, ...]
    copies: bool
    tiers: tuple[str, ...]
    drafts: bool
    goes_back: bool
    peers: bool
    adapters: bool
    text: bool
    vectors: bool
    hidden: bool
    multi_steps: bool
