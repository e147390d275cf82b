"""Measures a trained model on validation data or on text, and prints one JSON object.

    python -m training.evaluate --workdir=RUN [--step=N] [--path=PATH] [--num_batches=N]
    python -m training.evaluate --hugging_face=DIR --path=PATH

Without --path, the program measures the run's validation data, with the same number of batches: `validation_loss` is
the value that train.py logs at that step. With --path, it measures a whole file or folder in rows of data.seq_len, read
as the run reads its data, and prints how: JSON and parquet are chats after a run on chats, and for --hugging_face, but
otherwise documents. A folder of other files is text. The newest checkpoint is read, or the checkpoint of step N. If the
run's config file registered the model, the data or the tokenizer, that file is loaded again, or the file given as
--config=FILE. The program uses all local devices, in one process. JAX_NUM_CPU_DEVICES=8 simulates several. Exit codes:
0 done; 2 a mistake in a flag, the data or a file; 1 anything else.
"""

import json
import math
import sys
from collections.abc import Sequence
from functools import partial

from absl import flags

from configs.schema.mixture import SPLIT, parse
from input_pipeline import ImageDataset, load
from input_pipeline.bad_documents import REMEDY
from input_pipeline.shard_formats import OF_CHATS, format_of
from input_pipeline.store import is_url
from runtime.command_line import prepare_output
from runtime.files.json_objects import JsonMapping, JsonObject
from runtime.files.paths import user_path
from training import trained
from training.datasets import validation_sets
from training.validation import Validator

READ_AS = {
    "chats": "chats by the template, with a loss on data.loss_on={0.loss_on}",
    "shards": "documents, with the text in data.text_field={0.text_field}",
    "folder": "text",
}


def main(argv: Sequence[str]) -> int:
    """Runs the program and returns its exit code. A user's mistake is reported in one line."""
    prepare_output()
    values = trained.new_flags()
    flags.DEFINE_string("path", None, "file or folder of text, documents or chats", flag_values=values)
    flags.DEFINE_integer("num_batches", None, "batches to measure", lower_bound=1, flag_values=values)

    def run() -> None:
        if values.hugging_face and not (values.workdir or values.path):
            raise ValueError("--hugging_face needs --path, a folder of text or a file of chats: there is no run's data")
        model = trained.named(values, data=partial(section_of, values.path, has_run=bool(values.workdir)))
        try:
            print(json.dumps(evaluate(model, num_batches=values.num_batches, whole=bool(values.path))))
        except ValueError as error:
            raise ValueError(str(error).replace(REMEDY, "")) from error  # no flag sets keys of the run

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
    if whole:
        trained.say(f"{config.data.path} is read as {READ_AS[config.data.source].format(config.data)}")
    for data in sets.values():
        if not isinstance(data, ImageDataset):
            skipped = f"broken documents that are skipped: {len(data.skipped)}" if data.skipped else ""
            for line in filter(None, (data.summary, skipped)):
                trained.say(line)
    most = sys.maxsize if whole else config.eval.num_batches
    found = Validator(model.experiment, sets, num_batches or most)(model.params, trained.say)
    causal = {"perplexity": math.exp(found.loss)} if config.data.objective == "causal" else {}
    return {"step": model.step, **found.scalars(), **causal}


def section_of(path: str | None, run: JsonMapping, *, has_run: bool) -> JsonObject:
    """Returns the keys of the section `data` that read `path` as a run with the section `run` reads its data."""
    if not path:
        return {}
    sources = {component.source for component in parse(run["mixture"])} or {run["source"] if has_run else "chats"}
    changed = {"mixture": "", "pattern": "", "path": path}
    if "chats" in sources and _has_records(path):
        return changed | {"source": "chats", "packing": "whole"}
    if "shards" in sources or is_url(path) or format_of(path):
        return changed | {"source": "shards", "packing": run["packing"].replace("whole", "documents")}
    return changed | {"source": "folder"}


def _has_records(path: str) -> bool:
    """Whether a path is a URL, a file of JSON or parquet, or a folder with such a file."""
    names = (file.name for file in user_path(path).rglob("*"))
    return is_url(path) or any(format_of(name) in OF_CHATS for name in (path, *names))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
