"""What a Config says of drafts: part of `config/schema.py`."""

from dataclasses import dataclass

AHEAD_DRAFTERS = ("NEXTN", "EAGLE")
"""Drafters that run a layer of the served model's checkpoint where no model is named."""
MODEL_DRAFTERS = ("STANDALONE", "EAGLE3", "DFLASH", *AHEAD_DRAFTERS)
"""Drafters that run a model of their own."""


@dataclass(frozen=True)
class SpeculativeConfig:
    algorithm: str = ""
    """Name in the table of drafters; "" = tokens are not drafted."""
    num_tokens: int = 0
    """Tokens that a row verifies at most, the last one included; 0: config/speculation.py. Of a
    model that drafts blocks: of a block, 0 = as it was trained."""
    block_size: int = 0
    """The same of a model that drafts blocks alone."""
    num_steps: int = 0
    """Drafts after each sampled token at most; 0 = one less than `num_tokens`. Where drafts of a
    model branch: levels of their tree."""
    eagle_topk: int = 0
    """Tokens that a model drafts behind each one; 1 = a chain, 0: config/speculation.py."""
    min_match: int = 1
    """Shortest suffix that NGRAM looks for in what it has seen."""
    max_match: int = 12
    """Longest one."""
    max_breadth: int = 10
    """Places with the same suffix that are looked at."""
    min_breadth: int = 1
    """Ways in which a token goes on, at least where so many are known; 1 = drafts are a chain."""
    match_type: str = "BFS"
    """"BFS": the newest of these places is continued, "PROB": by what most of them go on with."""
    branch: int = 18
    """Tokens of the shortest suffix and its continuation together."""
    capacity: int = 10_000_000
    """Nodes of NGRAM's memory: `branch` of them for each token that is remembered."""
    is_fixed: bool = False
    """Each row makes and verifies as many drafts as it may, whatever they are likely to bring."""
    draft_source: str = ""
    """The model that drafts, named as `LoadConfig.source`."""
    draft_path: str = ""
    """Where it lies on this machine once fetched."""
    draft_revision: str = ""
    draft_load_format: str = "auto"
    draft_quantization: str = ""
    """What its float weights are rounded to at load; "" = kept as they are."""
    token_map: str = ""
    """File of the token ids that a model of EAGLE drafts; "" = all."""

    @property
    def is_model(self) -> bool:
        """Whether a model drafts, beside the one that answers."""
        return self.algorithm in MODEL_DRAFTERS

    @property
    def is_mtp(self) -> bool:
        """Whether that is a layer which the served model's checkpoint brings."""
        return self.algorithm in AHEAD_DRAFTERS and not self.is_eagle

    @property
    def is_eagle(self) -> bool:
        """Whether that was trained to draft for the served model, token by token."""
        return self.algorithm in ("EAGLE", "EAGLE3") and bool(self.draft_source)

    @property
    def is_block(self) -> bool:
        """Whether that was trained to draft for the served model, a block in one pass."""
        return self.algorithm == "DFLASH"

    @property
    def borrows_head(self) -> bool:
        """Whether that makes logits with the head of the served model."""
        return self.is_model and self.algorithm != "STANDALONE"

    @property
    def is_trained(self) -> bool:
        """Whether that was trained to draft for the served model."""
        return self.is_eagle or self.is_block

    @property
    def drafts(self) -> int:
        """Drafts of a row at most; 0 = none are made."""
        drafts = self.num_tokens - 1 if self.eagle_topk > 1 else self.num_steps
        return drafts if self.algorithm else 0

    @property
    def levels(self) -> int:
        """Passes that a model takes for all drafts of a row; 0 = one for each."""
        if self.is_block:
            return 1
        return self.num_steps if self.is_model and self.eagle_topk > 1 else 0
