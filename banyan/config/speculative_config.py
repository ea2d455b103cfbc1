"""SpeculativeConfig: the settings of speculative decoding, a part of `schema.Config`."""

from dataclasses import dataclass

MTP_DRAFTERS = ("NEXTN", "EAGLE")
"""Drafters that use the MTP layer of the served model's checkpoint if no draft model is given."""
MODEL_DRAFTERS = ("STANDALONE", "EAGLE3", "DFLASH", *MTP_DRAFTERS)
"""Drafters that run a model."""


@dataclass(frozen=True)
class SpeculativeConfig:
    algorithm: str = ""
    """Name in the table of drafters; "" = no speculative decoding."""
    num_tokens: int = 0
    """Maximum tokens that a row verifies, the last sampled one included; 0 = set by
    config/speculation.py. For block drafters: tokens per block, 0 = as trained."""
    block_size: int = 0
    """Tokens per block, for block drafters only; 0 = `num_tokens`."""
    num_steps: int = 0
    """Maximum drafts per sampled token, or levels of a draft tree; 0 = `num_tokens` - 1."""
    eagle_topk: int = 0
    """Branches per draft token; 1 = a chain, 0 = set by config/speculation.py."""
    min_match: int = 1
    """Minimum suffix length that NGRAM matches, in tokens."""
    max_match: int = 12
    """Maximum suffix length that NGRAM matches."""
    max_breadth: int = 10
    """Maximum matches that NGRAM looks at."""
    min_breadth: int = 1
    """Minimum branches per draft token, if that many are known; 1 = drafts are a chain."""
    match_type: str = "BFS"
    """"BFS" = draft the newest continuation, "PROB" = the most frequent."""
    branch: int = 18
    """Maximum tokens of matched suffix and continuation together."""
    capacity: int = 10_000_000
    """Maximum nodes of NGRAM's trie, `branch` per stored token."""
    accept_single: float = 1.0
    """A sampled row accepts a draft of at least this probability; 1 = only what it samples."""
    accept_total: float = 1.0
    """A sampled row accepts a draft with its probability divided by this."""
    is_fixed: bool = False
    """Always draft the maximum, instead of adapting to acceptance and cost."""
    draft_source: str = ""
    """The draft model, as in `LoadConfig.source`."""
    draft_path: str = ""
    """Path on this machine after fetching."""
    draft_revision: str = ""
    draft_load_format: str = "auto"
    draft_quantization: str = ""
    """Quantization of its float weights at load; "" = none."""
    draft_attention: str = ""
    """As `DeviceConfig.attention`, for the draft model; "" = as the served model."""
    draft_config_file: str = ""
    """File that replaces the draft model's config.json; "" = none."""
    token_map: str = ""
    """File of the token ids that EAGLE's lm_head is restricted to; "" = all."""

    @property
    def is_model(self) -> bool:
        """Whether a draft model or MTP layer makes the drafts."""
        return self.algorithm in MODEL_DRAFTERS

    @property
    def is_mtp(self) -> bool:
        """Whether the MTP layer of the served checkpoint makes the drafts."""
        return self.algorithm in MTP_DRAFTERS and not self.is_eagle

    @property
    def is_eagle(self) -> bool:
        """Whether an EAGLE or EAGLE3 draft model makes the drafts."""
        return self.algorithm in ("EAGLE", "EAGLE3") and bool(self.draft_source)

    @property
    def is_block(self) -> bool:
        """Whether a block draft model (DFLASH) makes the drafts."""
        return self.algorithm == "DFLASH"

    @property
    def borrows_head(self) -> bool:
        """Whether drafts use the lm_head of the served model."""
        return self.is_model and self.algorithm != "STANDALONE"

    @property
    def is_trained(self) -> bool:
        """Whether the draft model was trained for the served model."""
        return self.is_eagle or self.is_block

    @property
    def drafts(self) -> int:
        """Maximum drafts per row; 0 = none."""
        drafts = self.num_tokens - 1 if self.eagle_topk > 1 else self.num_steps
        return drafts if self.algorithm else 0

    @property
    def levels(self) -> int:
        """Passes of the draft model per step; 0 = one per draft."""
        if self.is_block:
            return 1
        return self.num_steps if self.is_model and self.eagle_topk > 1 else 0
