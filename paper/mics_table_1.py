"""MiCS table 1: the parameters of its six models."""

import importlib

from paper import published
from paper.records import Records
from paper.tables import NONE, Row, Section, comparison, fixed, table

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
            "**Structure**, published; where our config has another number it follows in brackets. The partition "
            "groups of RoBERTa and GPT2 are not stated; both ran on 16 GPUs.",
            _shapes(),
        ],
    )


def _shapes() -> str:
    rows = []
    for name, (_, config) in published.TABLE_1.items():
        whole = importlib.import_module(f"configs.{config}").get_config()
        model = whole.model
        ours = (model.hidden, model.intermediate, model.num_layers, model.num_heads, model.vocab_size)
        pairs = zip(published.TABLE_1_SHAPES[name], (*ours, whole.sharding.partition_size), strict=True)
        rows.append([name, *(_beside(theirs, own) for theirs, own in pairs)])
    return table(["", "hidden", "intermediate", "layers", "heads", "vocabulary", "GPUs of a partition group"], rows)


def _beside(published_value: int | None, ours: int) -> str:
    text = NONE if published_value is None else str(published_value)
    return text if ours == published_value else f"{text} ({ours})"
