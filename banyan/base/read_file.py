"""Small files that are read whole: regular ones alone, and no more of them than is expected.

A pipe has no end that could be waited for, and a device may have none at all.
"""

import os
import stat


def read_whole(path: str, most_bytes: int) -> bytes:
    """All of a file.

    Raises:
        OSError: it cannot be read, is no regular file, or has more bytes.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("it is not a regular file")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(f"it has more than {most_bytes:,} bytes")
    return content
