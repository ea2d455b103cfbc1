"""Drafters by name. A plug-in names itself in the entry points `banyan.drafters`."""

from banyan.base.table import Table
from banyan.runner.speculative.base import DrafterFactory

DRAFTERS: Table[DrafterFactory] = Table(
    "drafter",
    {
        "NGRAM": "banyan.runner.speculative.ngram:open_ngram",
        "DFLASH": "banyan.runner.speculative.dflash:open_block",
        "EAGLE": "banyan.runner.speculative.eagle:open_hidden",
        "EAGLE3": "banyan.runner.speculative.eagle:open_hidden",
        "NEXTN": "banyan.runner.speculative.eagle:open_hidden",
        "STANDALONE": "banyan.runner.speculative.standalone:open_standalone",
    },
    plugins="banyan.drafters",
)
