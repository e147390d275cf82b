"""MiCS table 1: the parameters of its six models."""

import importlib

from paper import published
from paper.records import Records
from paper.tables import Row, Section, comparison, fixed

billions = fixed(2, " B")


def section(records: Records) -> Section:
    """Returns the section."""
    rows = []
    for name, (size, config) in published.TABLE_1.items():
        model = importlib.import_module(f"configs.{config}").get_config().model
        matrices = 12 * model.num_layers * model.hidden**2 + model.vocab_size * model.hidden
        ours = records.num_params[config] / 1e9
        rows.append(Row(what=name, published=size, ours=ours, how=f"configs/{config}.py, its shapes", form=billions))
        what = f"{name}, 12 L h² + V h"
        rows.append(
            Row(what=what, published=matrices / 1e9, ours=ours, how="the same, against the formula", form=billions)
        )
    return Section(
        title="MiCS table 1: sizes of the models",
        blocks=[
            f"{published.MICS}. The paper gives hidden size, layers and vocabulary, and the size in the model's name; "
            "the formula counts the matrices of the layers and the embedding. Ours also have biases, norms, "
            "positions, a padded vocabulary and, the encoders, an output head. The paper prints 40 heads for BERT "
            "50B, which do not divide 8192; ours has 64 (the number of heads changes no size).",
            comparison(rows),
        ],
    )
