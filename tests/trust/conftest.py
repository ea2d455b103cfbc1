"""Fixtures of the battery: those of the end-to-end tests."""

from tests.system.conftest import demo_model, server, tiny_model

__all__ = ["demo_model", "server", "tiny_model"]
