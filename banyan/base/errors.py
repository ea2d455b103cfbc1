"""Errors that users see. Each has what happened, with the numbers, and what to do next."""


class BanyanError(Exception):
    """Base of the errors that are shown without a stack trace.

    Args:
        text: what happened, with the numbers.
        hint: what to do about it; shown after the text.
    """

    exit_code = 1

    def __init__(self, text: str, hint: str = "") -> None:
        whole = f"{text.removesuffix('.')}. {hint[:1].upper()}{hint[1:]}"
        super().__init__(whole if hint else text)
        self.text = text
        self.hint = hint

    @classmethod
    def with_exit_code(cls, text: str, exit_code: int) -> "BanyanError":
        """An error that another process has reported, with its exit code."""
        error = cls(text)
        error.exit_code = exit_code
        return error


class ConfigError(BanyanError):
    """A start-up argument, model file or combination that cannot work."""

    exit_code = 2


class ModelError(BanyanError):
    """A model that is missing, truncated, hostile or of an unknown kind."""

    exit_code = 3


class CapacityError(BanyanError):
    """Not enough memory, ports, disk or another finite thing."""

    exit_code = 4


class DeviceError(BanyanError):
    """A device, driver or rank that failed."""

    exit_code = 5


class RequestError(BanyanError):
    """A request that is refused; it fails alone.

    Args:
        param: the field at fault, "" when none is.
        status: HTTP status.
        code: short machine-readable reason.
    """

    def __init__(
        self,
        text: str,
        *,
        param: str = "",
        status: int = 400,
        code: str = "invalid_request",
        hint: str = "",
    ) -> None:
        super().__init__(text, hint)
        self.param = param
        self.status = status
        self.code = code
