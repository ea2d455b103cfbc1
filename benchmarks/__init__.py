"""Comparisons with other engines. Not part of the package."""
