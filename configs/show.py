"""Prints the config that a command line describes, as JSON.

python -m configs.show --config=configs/X.py[:arg] [--config.a.b=value ...]
"""

import json
import sys
from collections.abc import Sequence

from configs import command_line


def main(argv: Sequence[str]) -> int:
    """Prints the config and returns 0; for a user's mistake prints one line to stderr and returns 2."""
    try:
        print(json.dumps(command_line.parse(argv).to_dict(), indent=2))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
