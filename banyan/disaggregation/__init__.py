"""Rooms over a network: what one server gives to another, and who may take it."""
