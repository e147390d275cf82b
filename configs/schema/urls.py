"""URLs in a config, which is saved and shown: secrets do not belong there."""

import re

_SECRET = re.compile(r"\w://.*[?#@]", re.DOTALL)


def refuse_secrets(what: str, text: str) -> None:
    """ValueError, which does not show `text`, if it has a URL with a query, a fragment, a user name or a password."""
    if _SECRET.search(text):
        raise ValueError(
            f"{what} is a URL with a query, or with a user name or password: it would be saved in config.json or "
            "shown; leave these out, and give credentials by environment variables (docs/data.md)"
        )
