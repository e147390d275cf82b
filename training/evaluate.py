"""Measures a trained model on validation data or on text, and prints one JSON object.

    python -m training.evaluate --workdir=RUN [--step=N] [--path=FOLDER] [--num_batches=N]
    python -m training.evaluate --hugging_face=DIR --path=FOLDER

Without --path, the program measures the run's validation data, with the same number of batches: `validation_loss` is
the value that train.py logs at that step. With --path, it measures all text below FOLDER, or all chats of a file of
JSON or parquet, in windows of the run's data.seq_len. The newest checkpoint is read, or the checkpoint of step N. If
the run's config file registered the model, the data or the tokenizer, that file is loaded again, or the file given as
--config=FILE. The program uses all local devices, in one process. JAX_NUM_CPU_DEVICES=8 simulates several. Exit codes:
0 done; 2 a mistake in a flag, the data or a file; 1 anything else.
"""

import json
import math
import sys
from collections.abc import Sequence

from absl import flags

from configs.schema.mixture import SPLIT
from input_pipeline import ImageDataset, load
from input_pipeline.shard_formats import OF_CHATS, format_of
from runtime.command_line import prepare_output
from runtime.files.json_objects import JsonObject
from training import trained
from training.datasets import validation_sets
from training.validation import Validator


def main(argv: Sequence[str]) -> int:
    """Runs the program and returns its exit code. A user's mistake is reported in one line."""
    prepare_output()
    values = trained.new_flags()
    flags.DEFINE_string("path", None, "folder of text, or a file of chats", flag_values=values)
    flags.DEFINE_integer("num_batches", None, "batches to measure", lower_bound=1, flag_values=values)

    def run() -> None:
        if values.hugging_face and not (values.workdir or values.path):
            raise ValueError("--hugging_face needs --path, a folder of text or a file of chats: there is no run's data")
        model = trained.named(values, data=_section(values.path))
        print(json.dumps(evaluate(model, num_batches=values.num_batches, whole=bool(values.path))))

    return trained.program(argv, __doc__ or "", values, run)


def evaluate(model: trained.Trained, *, num_batches: int | None = None, whole: bool = False) -> dict[str, object]:
    """Returns the step, metrics by their keys in metrics.jsonl, and the perplexity of a causal model.

    `whole`: measures all data instead of the validation split. ValueError if the split differs from the run's.
    """
    config = model.config
    tokenizer = model.tokenizer() if config.data.objective != "classify" or whole else None
    whole_data = lambda: {"": load(config.data, "all", config.seed, tokenizer=tokenizer)}
    sets = whole_data() if whole else validation_sets(config, (), tokenizer)
    split = next((sets[name].fingerprint for name in ("", SPLIT) if name in sets), None)
    if not whole and split and model.data.get("validation_fingerprint", split) != split:
        raise ValueError(f"{model.name} was validated on other data: {config.data.origin} has changed; give --path")
    for data in sets.values():
        if not isinstance(data, ImageDataset) and data.summary:
            trained.say(data.summary)
    most = sys.maxsize if whole else config.eval.num_batches
    found = Validator(model.experiment, sets, num_batches or most)(model.params, trained.say)
    causal = {"perplexity": math.exp(found.loss)} if config.data.objective == "causal" else {}
    return {"step": model.step, **found.scalars(), **causal}


def _section(path: str | None) -> JsonObject:
    """Returns the keys of the section `data` that `--path` sets."""
    if not path:
        return {}
    changed = {"mixture": "", "pattern": "", "path": path}
    return changed | ({"source": "chats", "packing": "whole"} if format_of(path) in OF_CHATS else {"source": "folder"})


if __name__ == "__main__":
    sys.exit(main(sys.argv))
