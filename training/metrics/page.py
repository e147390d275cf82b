"""`render`: a page of one file, from a Jinja template that extends training/metrics/page.html."""

import base64
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from runtime.files import palette

PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parents[2]),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
PAGES.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
PAGES.filters["class"] = lambda n: f"colour-{'fill' if n is None else n % len(palette.SERIES)}"


def render(template: str, **values: object) -> str:
    """Returns the page of a template, a path relative to the root of the repository. Its values are escaped.

    Every page has `title`, `heading`, `badge` with its `mood` (good, warn or bad), `about` and `footer`.
    """
    return PAGES.get_template(template).render(palette=palette, **values)
