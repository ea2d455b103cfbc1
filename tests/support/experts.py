"""Configurations of a model with experts."""

from dataclasses import replace

from banyan.config.resolve import resolve
from banyan.config.schema import Config
from banyan.model_config.model_config import ExpertFacts
from tests.support.configs import MODEL_CONFIG, NOTHING
from tests.support.flags import config_of

EXPERTS = replace(MODEL_CONFIG, experts=ExpertFacts(count=4, per_token=2, inner=32))

SHARED = ("--tp", "2", "--ep", "2")


def config_with(*flags: str) -> Config:
    return resolve(config_of(*flags), EXPERTS, NOTHING)
