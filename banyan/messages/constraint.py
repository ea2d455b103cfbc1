"""Constraint: the required form of an output, encoded as one string (`Generate.grammar`).

    kind:text             kind@id,id,…:text

With ids the constraint begins after that sequence of tokens (the end of the thinking); what comes
before is free. Equal constraints are equal strings, so they share one compilation.
"""

import msgspec

JSON_SCHEMA = "json_schema"
"""A JSON Schema, as JSON."""
REGEX = "regex"
"""The whole output matches."""
EBNF = "ebnf"
"""A grammar in GBNF notation; its start is the rule "root"."""
STRUCTURAL_TAG = "structural_tag"
"""{"type": "structural_tag", "format": …}: free text with constrained tagged parts."""

KINDS = (JSON_SCHEMA, REGEX, EBNF, STRUCTURAL_TAG)


class Constraint(msgspec.Struct, frozen=True):
    """One constraint; `text` is in the notation of its kind."""

    kind: str
    text: str
    after: tuple[int, ...] = ()
    """Token ids that end the unconstrained beginning; () = constrained from the start."""

    def encode(self) -> str:
        ids = "@" + ",".join(map(str, self.after)) if self.after else ""
        return f"{self.kind}{ids}:{self.text}"

    @classmethod
    def decode(cls, encoded: str) -> "Constraint":
        """The inverse of `encode`; ValueError when `encoded` is not of that form."""
        head, colon, text = encoded.partition(":")
        kind, _, ids = head.partition("@")
        if not colon or kind not in KINDS:
            raise ValueError(f"no constraint begins with {head[:40]!r}; known: {', '.join(KINDS)}")
        return cls(kind, text, tuple(map(int, ids.split(","))) if ids else ())
