"""Converts safetensors checkpoints of transformers into the start of a run, and runs into such checkpoints.

    python -m training.convert --from_hugging_face=DIR --config=configs/X.py --out=WORKDIR [--config.a.b=value ...]
    python -m training.convert --to_hugging_face=DIR --workdir=WORKDIR [--step=N] [--max_file_gb=5]
    python -m training.convert --to_peft=DIR --workdir=WORKDIR [--step=N]

The first command writes step 0 of a run, and `train.py` with the same config and `--workdir` continues from it. (A run
can also start from DIR itself, with `model.weights`, which also works on several machines.) The second command writes
the parameters of the newest checkpoint, or of step N, in model.compute_dtype, and the run's tokenizer if that is a
tokenizer.json. It copies generation_config.json and the ids of special tokens from the weights that the run began with.
After a run on chats the token that ends an answer is among the ids that end a text. Adapters of LoRA are merged into
their base, in the dtype of its files. The third command writes only the adapters, in PEFT's layout. Each command runs
in one process. Exit codes: 0 done; 2 a mistake in a flag, the config or a file; 1 anything else.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from absl import flags

import models
from configs import command_line
from configs.hugging_face import CONFIG_FILE
from configs.schema import MODELS, Config, TransformerConfig, with_defaults
from elastic import check_path
from elastic.checkpointer import Checkpointer
from elastic.saved_arrays import SavedArrays
from input_pipeline import tokenizer_config, tokenizers
from input_pipeline.chat_template import TEMPLATE_FILE, ChatTemplate
from models import hugging_face, hugging_face_export, lora, peft
from runtime.command_line import complain, make_folder, prepare_output
from runtime.files import json_objects, run_directory
from runtime.files.json_objects import JsonObject
from runtime.files.paths import user_path
from sharding.spec import is_spec
from sharding.state import by_name
from training.answer_ends import end_of_answers
from training.devices import use_cpu_devices
from training.experiment import BASE, make_experiment
from training.resume import check_same_base, is_same_run
from training.weights_tokenizer import TOKENIZER_FILE, check_tokenizer

MAX_FILE_GB = 5.0
GENERATION_FILE = "generation_config.json"  # a file of transformers with the tokens that end an answer


def main(argv: Sequence[str]) -> int:
    """Runs the program and returns its exit code. A user's mistake is reported in one line."""
    prepare_output()
    values = command_line.new_flags()
    flags.DEFINE_string("from_hugging_face", None, "folder of the checkpoint to read", flag_values=values)
    flags.DEFINE_string("out", None, "the new run's directory", flag_values=values)
    flags.DEFINE_string("to_hugging_face", None, "folder of the checkpoint to write", flag_values=values)
    flags.DEFINE_string("to_peft", None, "folder of the adapters to write", flag_values=values)
    flags.DEFINE_string("workdir", None, "directory of the run to read", flag_values=values)
    flags.DEFINE_integer("step", None, "step to read (default: the newest)", flag_values=values)
    flags.DEFINE_float("max_file_gb", None, "GB of tensors in a file (10^9 bytes; default: 5)", flag_values=values)
    try:
        if command_line.asks_for_help(argv):
            print(command_line.help_text(__doc__ or "", argv, values))
        elif any(word.lstrip("-").startswith("from_hugging_face") for word in argv[1:]):
            config = command_line.parse(argv, values)
            _refuse(values, "to_hugging_face", "to_peft", "workdir", "step", "max_file_gb")
            import_run(config, _given(values, "from_hugging_face"), _given(values, "out"))
        else:
            if rest := values(list(argv))[1:]:
                raise ValueError(f"unexpected argument {rest[0]!r}; flags are written --name=value")
            _refuse(values, "config", "out")  # the run has a config
            if values.to_peft:
                _refuse(values, "to_hugging_face", "max_file_gb")
                export_adapters(_given(values, "workdir"), _given(values, "to_peft"), step=values.step)
                return 0
            folder = _given(values, "to_hugging_face")
            max_file_gb = MAX_FILE_GB if values.max_file_gb is None else values.max_file_gb
            if not max_file_gb > 0:
                raise ValueError(f"--max_file_gb={max_file_gb} must be above 0")
            max_bytes = int(max_file_gb * 1e9)
            export_run(_given(values, "workdir"), folder, step=values.step, max_file_bytes=max_bytes)
    except flags.Error as error:
        return complain(ValueError(str(error)))
    except (ValueError, OSError) as error:
        return complain(error)
    return 0


def import_run(config: Config, folder: Path, workdir: Path) -> None:
    """Writes step 0 of a run whose parameters come from `folder`. ValueError if it does not fit the config."""
    check_path(workdir)
    directory = workdir / run_directory.CHECKPOINTS
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} holds checkpoints already; choose another --out")
    if not isinstance(config.model, TransformerConfig):
        raise ValueError(f"model.kind={config.model.kind} has no counterpart in transformers; choose another config")
    if config.model.lora_rank:
        raise ValueError("a checkpoint does not hold the base of adapters: start the run with model.weights instead")
    if config.mesh.num_cpu_devices:
        use_cpu_devices(config.mesh.num_cpu_devices)
    experiment = make_experiment(replace(config, model=replace(config.model, weights=str(folder))))
    experiment.open_weights()  # check model sizes before the tokenizer
    check_tokenizer(experiment.config, tokenizers.tokenizer_for(config.data))
    state = experiment.init_state()
    make_folder(workdir, "--out")
    with Checkpointer(directory, config.checkpoint, is_same_run=is_same_run) as checkpointer:
        checkpointer.save(0, experiment.in_files(state), data={"step": 0, "seed": config.seed}, config=config.to_dict())
    print(f"{workdir} starts from {folder}: {experiment.model.num_params} parameters; train.py continues from there")


def export_run(workdir: Path, folder: Path, *, step: int | None, max_file_bytes: int) -> None:
    """Writes the parameters of a run's checkpoint into `folder`, and its tokenizer if that is a tokenizer.json.

    ValueError if the step does not exist, or if no architecture of transformers computes the same function as the
    model.
    """
    saved, model, data = _read(workdir, step)
    built = models.build(model)
    read, dtype = _reader(saved, built, workdir)
    tokenizer = template = None
    file = user_path(data["tokenizer_path"])
    if data["tokenizer"] == "hugging_face":
        tokenizer = tokenizers.HuggingFace(file, add_bos=data["add_bos"], eos_token=data["eos_token"])
        if data["source"] == "chats" or "chats:" in data["mixture"]:
            template = ChatTemplate(file)
    end = end_of_answers(tokenizer, template) if tokenizer and template else None
    make_folder(folder, "--to_hugging_face")
    token_ids = ({"eos_token_id": tokenizer.separator} if tokenizer else {}) | _token_ids(model.weights)
    written = hugging_face_export.write(
        built,
        folder,
        read,
        dtype=dtype,
        max_file_bytes=max_file_bytes,
        token_ids=token_ids,
    )
    if tokenizer:
        _write_tokenizer(tokenizer, file, model.max_len, folder, template)
    if generation := _generation(model.weights, token_ids, end):
        (folder / GENERATION_FILE).write_text(json.dumps(generation, indent=2) + "\n")
    print(f"{folder}: step {saved.step} of {workdir} in {len(written)} file{'s' if len(written) > 1 else ''}")


def export_adapters(workdir: Path, folder: Path, *, step: int | None) -> None:
    """Writes the adapters of a run's checkpoint into `folder`. ValueError if it has no adapters that PEFT supports."""
    saved, model, _ = _read(workdir, step)
    if not model.lora_rank:
        raise ValueError(f"{workdir} trained all parameters, no adapters; use --to_hugging_face")
    make_folder(folder, "--to_peft")
    read = lambda path: saved.read(_saved_name(path))[0]
    peft.write(models.build(model), folder, read, base=os.path.expanduser(model.weights))
    print(f"{folder}: adapters of step {saved.step} of {workdir}")


def _read(workdir: Path, step: int | None) -> tuple[SavedArrays, TransformerConfig, JsonObject]:
    """Returns a run's checkpoint, and its sections `model` and `data`."""
    saved = SavedArrays(workdir / run_directory.CHECKPOINTS, step)
    # only these two sections, because others may contain names that the run's --config registers
    config = with_defaults(saved.config)
    section, data = MODELS.get(kind := config["model"]["kind"]), config["data"]
    if section is None or not issubclass(section, TransformerConfig):
        raise ValueError(f"{workdir} trained model.kind={kind}, which has no counterpart in transformers")
    return saved, section(**config["model"]), data


def _reader(saved: SavedArrays, model: models.Model, workdir: Path) -> tuple[Callable[[str], np.ndarray], str]:
    """Returns the function that reads a parameter `[...]` by its path, and the dtype in which the model is written.

    The dtype is model.compute_dtype, in which the model has used its parameters. After a run with adapters the function
    returns the base with the adapters merged into it, and the dtype is that in the base's files.

    ValueError for a base that was initialised from the seed, is missing, or has changed.
    """
    config = model.config
    assert isinstance(config, TransformerConfig)
    of_checkpoint = lambda path: saved.read(_saved_name(path))[0]
    if not config.lora_rank:
        return of_checkpoint, config.compute_dtype
    if not config.weights:
        raise ValueError("model.weights is empty: the base of these adapters is random; --to_peft writes them alone")
    base, parameters = hugging_face.Weights(model, config.weights), by_name(model.plain_specs, is_spec)
    check_same_base(saved.data, {BASE: base.fingerprint()}, workdir)

    def read(path: str) -> np.ndarray:
        if config.lora_embeddings and path in lora.EMBEDDINGS:
            return of_checkpoint(path)
        if (adapters := lora.adapter_paths(path))[0] not in parameters:
            return base.whole(path)
        return lora.merge(config, base.whole(path), *map(of_checkpoint, adapters))

    return read, base.dtype


def _saved_name(path: str) -> str:
    return "params." + path.replace("/", ".")


def _token_ids(weights: str) -> JsonObject:
    """Returns the special-token ids, which end answers, from the config.json of the weights, if it exists."""
    file = user_path(weights) / CONFIG_FILE
    found = json_objects.read(file) if weights and file.is_file() else {}
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: found[name] for name in names if found.get(name) is not None}


def _generation(weights: str, token_ids: Mapping[str, object], end: int | None) -> JsonObject:
    """Returns the generation_config.json of the weights, or {}, with `end` added to the ids that end a text.

    A base model knows only the end of a document, while chats have taught it the end of an answer.
    """
    file = user_path(weights) / GENERATION_FILE
    found = json_objects.read(file, lenient=True) if weights and file.is_file() else {}
    known = (found.get("eos_token_id"), token_ids.get("eos_token_id"), [])
    ids = next(one for one in known if one is not None)
    ids = ids if isinstance(ids, list) else [ids]
    return found if end is None or end in ids else found | {"eos_token_id": [*ids, end]}


def _write_tokenizer(
    tokenizer: tokenizers.HuggingFace, file: Path, max_len: int, folder: Path, template: ChatTemplate | None
) -> None:
    """Writes the run's tokenizer.json, its chat template, and the config by which transformers finds the tokenizer."""
    shutil.copyfile(file, folder / TOKENIZER_FILE)
    special = {"eos_token": tokenizer.separator_token, "mask_token": tokenizer.mask_token}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_len}
    about |= {name: token for name, token in special.items() if token}
    if tokenizer.adds_bos:
        about |= {"bos_token": tokenizer.bos_token, "add_bos_token": True}
    if template:
        about |= template.tokens
        (folder / TEMPLATE_FILE).write_text(template.source)
    (folder / tokenizer_config.CONFIG_FILE).write_text(json.dumps(about, indent=2) + "\n")


def _given(values: flags.FlagValues, name: str) -> Path:
    """Returns the path in a flag that the command needs. ValueError if the flag is missing."""
    value = values[name].value
    if not value:
        raise ValueError(f"--{name} is missing; python -m training.convert --help shows the commands")
    return user_path(value)


def _refuse(values: flags.FlagValues, *names: str) -> None:
    for name in names:
        if values[name].value is not None:
            raise ValueError(f"--{name} belongs to another command; python -m training.convert --help shows them")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
