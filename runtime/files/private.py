"""Files that only their user can read or write."""

import os


def opener(path: str, flags: int) -> int:
    """For `open`: makes the file where it is missing (mode 0600), and follows no link, which others may have put there.

    The mode of a file that is there already stays.
    """
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)
