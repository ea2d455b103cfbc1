"""What a runner is opened with (RunnerConfig), and what plans may ask of it (Abilities)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from banyan.config.schema import SparsityConfig
from banyan.runner.kvstore import GroupLayout
from banyan.runner.rank_page_access import RankAddress


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes and choices of one runner. Rank 0 sends it to the other ranks.

    Attributes:
        max_slots: slots are numbered 1 … max_slots; 0 is padding.
        max_length: longest request in tokens, prompt and output.
        groups: cache groups, in the order of the plans' group numbers.
        max_tokens: tokens of the largest step that is recorded; 0 = record nothing.
        shapes: rows of the decode steps to capture as graphs.
        prompt_shapes: tokens of the steps with prompts to capture as graphs.
        is_unpadded: steps of other numbers of rows run eagerly instead of padded.
        attention: name of the attention backend; "" = the model's default.
        draft_room: most drafts that one step verifies, in addition to the tokens of its rows.
        verified: tokens of a row with all its drafts; 0 = rows have no drafts.
        shares_pages: rank 0 reads and writes the KV pages of all ranks.
        rank_addresses: address of rank 0 for each rank on another machine, by rank.
        multi_step: decode steps that one plan may hold.
        carried: width of the extra input of each token (hidden states); 0 = none.
        aux_hidden_layers: layers whose inputs are kept as auxiliary hidden states.
        branching: longest path of a draft tree, from the newest token on; 0 = drafts are chains.
        raw_logprobs: report log-probabilities of the raw logits for outputs.
        collects_in_capture: Python collects garbage while graphs are captured.
        profiles_capture: log which operations the captures spend their time in.
        accept_single, accept_total: as in SpeculativeConfig.
        sparsity: which rows attend to few tokens.
        reads_all: hidden states or expert choices are read for every token, on at least one rank.
    """

    max_slots: int
    max_length: int
    groups: tuple[GroupLayout, ...]
    max_tokens: int = 0
    shapes: tuple[int, ...] = ()
    prompt_shapes: tuple[int, ...] = ()
    is_unpadded: bool = False
    attention: str = ""
    draft_room: int = 0
    verified: int = 0
    shares_pages: bool = False
    rank_addresses: Mapping[int, RankAddress] = field(default_factory=dict[int, RankAddress])
    multi_step: int = 1
    carried: int = 0
    aux_hidden_layers: tuple[int, ...] = ()
    branching: int = 0
    reads_all: bool = False
    raw_logprobs: bool = False
    collects_in_capture: bool = False
    profiles_capture: bool = False
    accept_single: float = 1.0
    accept_total: float = 1.0
    sparsity: SparsityConfig = SparsityConfig()


@dataclass(frozen=True)
class Abilities:
    """The parts of messages/plan.py that a runner carries out. An engine plans nothing else.

    Attributes:
        groups: kinds of cache groups.
        copies: pages are copied before and after the rows.
        tiers: tiers between which pages are copied (PageAt.tier).
        drafts: rows may bring drafts to verify.
        goes_back: states are rolled back when drafts are rejected.
        peers: a step may be agreed on with other replicas, also a step without rows.
        adapters: a join may name an adapter.
        text: rows sample and score.
        vectors: rows are pooled into embeddings.
        hidden: rows report their hidden states.
        multi_steps: a plan may hold several decode steps.
        features: joins may have spans.
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
    features: bool = False
