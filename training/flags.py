"""The command line of train.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from absl import flags

from configs import command_line
from configs.schema import Config
from elastic import check_path
from input_pipeline.tokenizers import with_vocab_size
from runtime import launchers
from runtime.files.paths import user_path
from runtime.supervisor import Supervisor
from training import groups


@dataclass(frozen=True, kw_only=True)
class Options:
    """A run as its command line describes it."""

    config: Config
    workdir: Path  # the run's directory; each independent replica has a separate one in it
    address: launchers.Address = launchers.FROM_ENVIRONMENT
    words: Sequence[str] = ()  # the part of the command line that describes the config: other programs accept it too
    group: int | None = None  # the number of an independent replica; None: the run is one program
    extends: bool = False  # num_steps may have been raised since the run in `workdir` began

    @property
    def config_file(self) -> str:
        """The absolute path of `--config`; "" without one."""
        return command_line.config_file(self.words)


def parse(argv: Sequence[str], usage: str, supervisor: Supervisor) -> Options | None:
    """Returns the options in `argv` (program first); None after printing the help that was asked for.

    ValueError for a mistake. With `--debug` the supervisor shows tracebacks, also for mistakes.
    """
    supervisor.shows_tracebacks = "--debug" in argv
    values = command_line.new_flags()
    flags.DEFINE_string("workdir", None, "the run's directory (default: runs/NAME-OF-CONFIG)", flag_values=values)
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0", flag_values=values)
    flags.DEFINE_integer("num_processes", None, "number of processes", flag_values=values)
    flags.DEFINE_integer("process_id", None, "number of this process", flag_values=values)
    flags.DEFINE_integer("group", None, "number of this replica (sharding.replicas=independent)", flag_values=values)
    flags.DEFINE_boolean("extend", False, "num_steps may be above that of the run in workdir", flag_values=values)
    flags.DEFINE_boolean("debug", False, "show tracebacks", flag_values=values)
    if command_line.asks_for_help(argv):
        print(command_line.help_text(usage, argv, values))
        return None
    config = with_vocab_size(command_line.parse(argv, values))
    supervisor.shows_tracebacks = values.debug
    if values.workdir == "":
        raise ValueError("--workdir= names no folder; give one, or leave --workdir out")
    workdir = user_path(values.workdir or Path("runs") / command_line.config_name(values))
    check_path(workdir)
    return Options(
        config=config,
        workdir=workdir,
        address=launchers.Address(
            coordinator=values.coordinator, num_processes=values.num_processes, process_id=values.process_id
        ),
        words=command_line.words_of_config(argv),
        group=groups.number(config, values.group),
        extends=values.extend,
    )
