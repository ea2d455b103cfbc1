"""The spec of a child process arrives unchanged."""

from dataclasses import replace

from banyan.config.schema import Config
from banyan.engine.process_spec import RANK, ProcessSpec
from banyan.model_config.model_config import StateFacts
from tests.server.fakes import MODEL_CONFIG


def test_a_duty_arrives_whole() -> None:
    """A state whose steps have no bound has one of infinity."""
    model_config = replace(MODEL_CONFIG, state=StateFacts("delta", 4))
    process_spec = ProcessSpec(RANK, Config(), model_config, "ipc:///a", 3, secret="s")
    assert ProcessSpec.decode(process_spec.encode()) == process_spec
