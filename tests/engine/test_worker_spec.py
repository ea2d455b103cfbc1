"""What a child process is told arrives as it was said."""

from dataclasses import replace

from banyan.config.schema import Config
from banyan.engine.worker_spec import RANK, Duty
from banyan.model_config.model_config import StateFacts
from tests.server.fakes import CARD


def test_a_duty_arrives_whole() -> None:
    """A state whose steps have no bound has one of infinity."""
    card = replace(CARD, state=StateFacts("delta", 4))
    duty = Duty(RANK, Config(), card, "ipc:///a", 3, secret="s")
    assert Duty.decode(duty.encode()) == duty
