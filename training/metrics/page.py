"""`render`: a page of one file, from a Jinja template that extends training/metrics/page.html."""

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from runtime.files import palette

ROOT = Path(__file__).parents[2]


def render(template: str, **values: Any) -> str:
    """Returns the page of a template, a path relative to the root of the repository. Its values are escaped.

    Every page has `title`, `heading`, `badge` with its `mood` (good, warn or bad), `about` and `footer`.
    """
    pages = Environment(
        loader=FileSystemLoader(ROOT), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    pages.filters["class"] = lambda n: f"colour-{'fill' if n is None else n % len(palette.SERIES)}"
    return pages.get_template(template).render(palette=palette, **values)
