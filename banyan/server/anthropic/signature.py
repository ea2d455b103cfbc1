"""The `signature` of a block of thinking: opaque to clients, who send it back as they got it.

It carries thinking that the client did not want to see, so that the model finds it again in the
next turn. It vouches for nothing.
"""

import base64
import binascii

from banyan.base.errors import RequestError

_MARK = "banyan:"


def signature(hidden: str = "") -> str:
    """The signature of a block whose thinking is shown, or hidden in here."""
    return _MARK + base64.b64encode(hidden.encode()).decode()


def hidden_in(given: object) -> str:
    """The thinking that a signature carries; "" in those of other servers.

    Raises:
        RequestError: it begins as ours and goes on as nothing of ours.
    """
    if not isinstance(given, str) or not given.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(given.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise RequestError(
            "the signature of a block of thinking has been changed", param="messages"
        ) from None
