"""The listings of docs/extending.md."""

import re

from support.running import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text()


LISTINGS = dict(re.findall(r"^## (.+)\n(?:(?!^## ).*\n)*?```python\n((?:.*\n)*?)```", PAGE, re.MULTILINE))
LOOP = LISTINGS.pop("A loop of your own")
