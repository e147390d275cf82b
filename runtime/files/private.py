"""Files that only their user can read or write."""

import os


def opener(path: str, flags: int) -> int:
    """An opener for `open`: creates a missing file with mode 0600, and follows no link, which others may have made.

    The mode of an existing file does not change.
    """
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)
