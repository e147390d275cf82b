"""A trained model on this process' devices, for programs that use it, independent of the mesh it was trained on.

The model comes from a run's checkpoint or a Hugging Face folder. Its parameters are sharded over all devices.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from absl import flags

from configs import command_line, hugging_face
from configs.schema import Config, defaults, with_defaults
from elastic.saved_arrays import SavedArrays
from input_pipeline.tokenizers import Tokenizer
from runtime.command_line import complain
from runtime.files import run_directory
from runtime.files.json_objects import JsonMapping, JsonObject
from runtime.files.paths import user_path
from sharding.frozen import joined
from sharding.mesh import Device
from sharding.padding import without_wrappers
from sharding.trees import Params
from training.datasets import tokenizer_of
from training.devices import use_compilation_cache
from training.experiment import Experiment, make_experiment
from training.registered import register_names
from training.resume import check_same_base
from training.weights_tokenizer import TOKENIZER_FILE

LONGEST = 1024  # tokens per row of a Hugging Face model
SectionChange = Callable[[JsonMapping], JsonMapping]  # from a section to the values that replace some of its values
KEPT = ("seed", "model", "data", "batch", "eval", "sample")  # sections from a run's config


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model with its parameters."""

    name: str  # for messages
    experiment: Experiment
    params: Params
    step: int | None  # step of the run; None without a run
    data: JsonMapping  # the checkpoint's record of the run's data

    @property
    def config(self) -> Config:
        """The config of the training run, adapted to the devices of this process."""
        return self.experiment.config

    def tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer. ValueError if it is a model of images, or has fewer ids than the tokenizer."""
        data = self.config.data
        if data.objective == "classify":
            raise ValueError(f"{self.name}: model.kind={self.config.model.kind} is no language model")
        return tokenizer_of(self.config)


def of_run(
    workdir: Path,
    step: int | None = None,
    *,
    config_file: str = "",
    data: SectionChange = lambda section: {},
    devices: Sequence[Device] = (),
) -> Trained:
    """Returns the model of a run's checkpoint, the newest by default. `data` replaces values of that section.

    `config_file` registers the names in the run's config (default: the run's config file).
    ValueError if the step does not exist or is damaged.
    """
    saved = SavedArrays(workdir / run_directory.CHECKPOINTS, step)
    register_names(saved.config, workdir, config_file)
    experiment = _experiment(with_defaults(saved.config), data, devices)
    check_same_base(saved.data, experiment.base_fingerprint, workdir)
    shapes = experiment.in_files(experiment.state_shapes).params
    trained = without_wrappers(saved.place({"params": shapes})["params"])
    params = joined(trained, experiment.frozen_params())
    return Trained(name=str(workdir), experiment=experiment, params=params, step=saved.step, data=saved.data)


def of_hugging_face(
    folder: Path, *, data: SectionChange = lambda section: {}, devices: Sequence[Device] = ()
) -> Trained:
    """Returns the model of a Hugging Face folder, with its tokenizer.json. ValueError if the folder has no model."""
    model = hugging_face.model(folder).to_dict()
    values: JsonObject = defaults(model["kind"]) | {"model": model}
    values["data"] |= {"tokenizer": "hugging_face", "tokenizer_path": str(folder / TOKENIZER_FILE)}
    values["data"] |= {"seq_len": min(LONGEST, model["max_len"])}
    values["data"] |= {"objective": "masked" if model["kind"] == "encoder" else "causal"}
    experiment = _experiment(values, data, devices)
    weights = experiment.open_weights()
    assert weights
    params = weights.load(experiment.state_shapes.params)
    return Trained(name=str(folder), experiment=experiment, params=params, step=None, data={})


def _experiment(saved: JsonMapping, data: SectionChange, devices: Sequence[Device]) -> Experiment:
    """Returns the parts of a run like the saved one, on other devices."""
    kind = saved["model"]["kind"]
    values: JsonObject = defaults(kind) | {name: saved[name] for name in KEPT}
    values["data"] = {**values["data"], **data(values["data"])}
    # other values may not suit these devices; norms use running averages, because nothing is trained
    free = {"attention": "auto", "remat": "full", "unroll": False, "norm_rows": 1}
    values["model"] = values["model"] | {name: value for name, value in free.items() if name in values["model"]}
    values["sharding"] |= {"strategy": "zero3"}
    return make_experiment(Config.from_dict(values), devices)


def new_flags() -> flags.FlagValues:
    """Returns the flags that name a trained model. Further flags can be defined on the result."""
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "directory of a run", flag_values=values)
    flags.DEFINE_integer("step", None, "step of its checkpoint", flag_values=values)
    flags.DEFINE_string("config", None, "config file with the run's registered names", flag_values=values)
    flags.DEFINE_string("hugging_face", None, "folder of a Hugging Face checkpoint", flag_values=values)
    return values


def named(values: flags.FlagValues, *, data: SectionChange = lambda section: {}) -> Trained:
    """Returns the model named by the flags."""
    use_compilation_cache()
    if bool(values.workdir) == bool(values.hugging_face):
        raise ValueError("give either --workdir=DIR, of a run, or --hugging_face=DIR")
    if values.workdir:
        return of_run(
            user_path(values.workdir), values.step, config_file=(values.config or "").partition(":")[0], data=data
        )
    for name in ("step", "config"):
        if values[name].value is not None:
            raise ValueError(f"--{name} belongs to --workdir")
    return of_hugging_face(user_path(values.hugging_face), data=data)


def program(argv: Sequence[str], usage: str, values: flags.FlagValues, run: Callable[[], None]) -> int:
    """Parses `argv` into the flags, runs a program and returns its exit code.

    A user's mistake is reported in one line.
    """
    if command_line.asks_for_help(argv):
        print(usage.strip())
        return 0
    try:
        if rest := values(list(argv))[1:]:
            raise ValueError(f"unexpected argument {rest[0]!r}; flags are written --name=value")
        run()
    except flags.Error as error:
        return complain(ValueError(str(error)))
    except (ValueError, OSError) as error:
        return complain(error)
    return 0


def say(line: str) -> None:
    """Prints a line about the work, separate from its result."""
    print(line, file=sys.stderr, flush=True)
