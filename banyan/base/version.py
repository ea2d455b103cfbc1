"""Which build this is."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """As the package says; "0" where it is not installed."""
    try:
        return version("banyan")
    except PackageNotFoundError:
        return "0"
