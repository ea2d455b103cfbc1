"""The version of Banyan."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Version of the installed package; "0" if it is not installed."""
    try:
        return version("banyan")
    except PackageNotFoundError:
        return "0"
