"""The head of a page of the docs: its title, and two lines that lead back."""

BACK = (
    "[mics-jax](../README.md) trains large sharded models on clusters with a slow network.\n"
    "This is one of [its pages](README.md), listed there in the order in which to read them."
)


def head(title: str) -> str:
    """Returns the title and the lines below it, with a newline at the end."""
    return f"# {title}\n\n{BACK}\n"
