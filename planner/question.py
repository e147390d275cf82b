"""The question that the planner's command line asks, checked."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite
from pathlib import Path

from absl import flags

from configs import command_line
from configs.schema import Config, TransformerConfig
from planner import clusters, probes, slices, targets
from planner.table import MOST_DEVICES
from runtime.command_line import check_file
from runtime.files.paths import user_path
from training.metrics.units import format_bytes

LOOKED_AT = 6  # programs compiled by a search, unless --compile sets their number
DEFAULT = "p4d.24xlarge"  # cluster
QUICK = (
    "without fused norms, for speed: steps are 1 to 2 % longer than with --strategy, and differ more where memory is "
    "tight; the two best strategies are compiled exactly if their memory is tight"
)
RATE = {"mbit": 1e6, "gbit": 1e9}
TOKENS = {"M": 1e6, "B": 1e9, "T": 1e12}
DECODER = Path(__file__).resolve().parent.parent / "configs" / "decoder.py"

TENSOR_ON_TPUS = (
    "mesh.tensor: the error bar leaves out tensor parallelism, with which 5 published steps on TPUs were planned "
    "13 % too short to 12 % too long"
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question of the command line, without output files."""

    name: str  # name of the config
    config: Config
    words: tuple[str, ...]
    cluster: clusters.Cluster
    nodes: tuple[int, ...]
    strategies: tuple[str, ...]
    is_search: bool
    most: int
    xla_flags: str
    notes: tuple[str, ...]
    is_quiet: bool


def command_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Returns the flags of the planner, not yet parsed."""
    values = command_line.new_flags()
    listing = "\n      ".join(map(str, clusters.CLUSTERS.values()))
    listing += f"\n      or TPU slices by their chips: {slices.EXAMPLES}"
    names = f"one of these ({DEFAULT}, unless it is given):\n      {listing}"
    texts = {
        "model": "in place of --config: a size of configs/decoder.py, such as 13b or layers=40,hidden=5120,heads=40",
        "tokens": "of the run, such as 10B, in place of the config's number of steps",
        "strategy": "strategies to compare: mics(8),zero3,hsdp+all_reduce=int8",
        "probe": "probe.json of lab.probe: measured devices and links",
        "rate": "of each node's link, such as 25gbit, if not the cluster's",
        "storage": "rate with which checkpoints are written, such as 20gbit, if not the cluster's",
        "png": "file for a picture of the best step; with several --nodes, of cost",
        "html": "file for a page of the plan, with its pictures",
        "spot_trace": "CSV of seconds,nodes: cost on spot nodes that come and go",
    }
    for name, meaning in texts.items():
        flags.DEFINE_string(name, None, meaning, flag_values=values)
    flags.DEFINE_string("cluster", DEFAULT, names, flag_values=values)
    about = "nodes of the cluster (one, unless it is given); several with commas between"
    flags.DEFINE_list("nodes", ["1"], about, flag_values=values)
    about = "whose habits to price: ours, the program's schedule; fsdp, which hides all it can; deepspeed, nothing; "
    about += "maxtext, nothing between TPU slices"
    flags.DEFINE_enum("as", "ours", [*clusters.SYSTEMS], about, flag_values=values)
    flags.DEFINE_boolean("search", False, "look for the best", flag_values=values)
    about = f"programs that a search looks at ({LOOKED_AT}, unless it is given)"
    flags.DEFINE_integer("compile", None, about, flag_values=values, lower_bound=1)
    flags.DEFINE_integer("devices_per_node", None, "if not the cluster's", flag_values=values, lower_bound=1)
    about = "nodes that fail, of each in a day, if not the cluster's"
    flags.DEFINE_float("failures", None, about, flag_values=values, lower_bound=0)
    about = "$ an hour of a node, if not the cluster's"
    flags.DEFINE_float("price", None, about, flag_values=values, lower_bound=0)
    flags.DEFINE_boolean("json", False, "print JSON", flag_values=values)
    flags.DEFINE_string("xla_flags", "", "more flags for XLA", flag_values=values)
    return values


def question_of(argv: Sequence[str], values: flags.FlagValues) -> Question:
    """Returns the question. ValueError if it cannot be answered."""
    argv = _with_config(argv)
    config = command_line.parse(argv, values)
    if values.tokens:
        argv = [*argv, f"--config.num_steps={_num_steps(values.tokens, config)}"]
        config = command_line.parse(argv, values)
    if config.mesh.stages > 1:
        raise ValueError(
            f"mesh.stages={config.mesh.stages}: the planner does not price pipelines; set mesh.stages=1, or see "
            "docs/strategies.md"
        )
    if config.sharding.replicas == "independent":
        raise ValueError(
            "sharding.replicas=independent: the planner compiles the step of one world, and says beside it what "
            "independent replicas take; set sharding.replicas=one_world"
        )
    for name in ("strategy", "probe", "rate", "storage", "png", "html", "spot_trace", "tokens"):
        value = values[name].value
        if value is not None and not value.strip(", "):
            raise ValueError(f"--{name}= is empty; give a value, or leave it out")
    cluster, measured = _cluster(values)
    if not values.nodes or not all(re.fullmatch(r"[1-9]\d*", word) for word in values.nodes):
        raise ValueError(f"--nodes={','.join(values.nodes)}: give one number from 1 on, or several, such as 1,2,4,8")
    nodes = tuple(sorted({*map(int, values.nodes)}))
    if nodes[-1] * cluster.devices_per_node > MOST_DEVICES:
        raise ValueError(
            f"--nodes={nodes[-1]} with {cluster.devices_per_node} devices each: a plan is made of at most "
            f"{MOST_DEVICES:,} devices, each of which jax must make here; {MOST_DEVICES // cluster.devices_per_node} "
            "nodes at most"
        )
    if values.search and values.strategy:
        raise ValueError("--search looks at every strategy; leave out --strategy")
    if values.compile and not values.search:
        raise ValueError(f"--compile={values.compile} is of a search; add --search, or leave it out")
    for word in shlex.split(values.xla_flags):
        if not word.startswith("--"):
            raise ValueError(f"--xla_flags: {word} is no flag; give --NAME=VALUE, several with spaces between")
    if values.png and Path(values.png).suffix != ".png":
        raise ValueError(f"--png={values.png}: the picture is a PNG; give a name that ends in .png")
    for name in ("png", "html"):
        if file := values[name].value:
            check_file(user_path(file), f"--{name}")
    system = str(values["as"].value)
    lacks_it = cluster.device.name == "V100" and config.model.compute_dtype == "bfloat16"
    no_bfloat16 = clusters.NO_BFLOAT16_NOTE if lacks_it else ""
    hidden = clusters.HIDDEN.get(cluster.hides, "")
    usual = f"--cluster={values.cluster}: {cluster}" if str(values.cluster).lower() in clusters.USUAL else ""
    habits = "" if system == "ours" else f"priced as {system} runs it: kernels hide {hidden}"
    return Question(
        name=_name(argv, values),
        config=config,
        words=tuple(command_line.words_of_config(argv)),
        cluster=cluster,
        nodes=nodes,
        strategies=tuple(re.findall(r"[^,\s]+", values.strategy or "")),
        is_search=values.search,
        most=values.compile or LOOKED_AT,
        xla_flags=values.xla_flags,
        notes=(
            *filter(None, [usual, cluster.device.note, no_bfloat16, measured, habits]),
            *_notes(cluster, is_search=values.search),
            *[TENSOR_ON_TPUS] * (config.mesh.tensor > 1 and isinstance(cluster, slices.SliceCluster)),
        ),
        is_quiet=values.json or not values.search,
    )


def _with_config(argv: Sequence[str]) -> list[str]:
    """Returns the words with `--config=configs/decoder.py:13b` in the place of `--model=13b`."""
    words = [f"--config={DECODER}:{word.partition('=')[2]}" if word.startswith("--model=") else word for word in argv]
    if words != [*argv] and any(word.startswith("--config=") for word in argv):
        raise ValueError("--model is a decoder of --config=configs/decoder.py; leave out one of the two")
    return words


def _num_steps(tokens: str, config: Config) -> int:
    """Returns the steps of a run over `tokens`, such as 10B."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([MBT])", tokens)
    if not match or not float(match[1]):
        raise ValueError(f"--tokens={tokens}: give a number and M, B or T, such as 10B")
    if not isinstance(config.model, TransformerConfig):
        raise ValueError(f"--tokens={tokens}: the config trains on images; set config.num_steps")
    return ceil(float(match[1]) * TOKENS[match[2]] / (config.batch.global_size * config.data.seq_len))


def _name(argv: Sequence[str], values: flags.FlagValues) -> str:
    """Returns the name of the user's model: the size, or the config's name with the changed keys of its model."""
    changed = [word.partition("model.")[2] for word in command_line.words_of_config(argv)[1:] if ".model." in word]
    name = command_line.config_name(values).removeprefix(f"{DECODER.stem}-")
    return f"{name} with {', '.join(changed)}" if changed else name


def _cluster(values: flags.FlagValues) -> tuple[clusters.Cluster, str]:
    """Returns the cluster with the flags' overlap, links and nodes, and a line about measured figures."""
    cluster, measured = slices.find_cluster(values.cluster), ""
    if values.devices_per_node and isinstance(cluster, slices.SliceCluster):
        raise ValueError(f"--devices_per_node is for GPUs; --cluster={cluster.name} names the chips of a slice")
    if values.devices_per_node:
        cluster = clusters.with_devices(cluster, values.devices_per_node)
    if values.probe:
        cluster, measured = probes.with_probe(cluster, user_path(values.probe), has_other_link=bool(values.rate))
    cluster = clusters.with_system(cluster, str(values["as"].value))  # a probe did not measure that system's attention
    if values.rate:
        cluster = clusters.with_rate(cluster, _rate(values, "rate"))
    if values.storage:
        cluster = replace(cluster, storage_bandwidth=_rate(values, "storage") / 8)
    if values.failures is not None:
        if not isfinite(values.failures):
            raise ValueError(f"--failures={values.failures}: give the nodes that fail, of each in a day, such as 0.01")
        cluster = replace(cluster, failures=values.failures)
    if values.price is not None:
        if not isfinite(values.price):
            raise ValueError(f"--price={values.price}: give what an hour of a node costs, such as 55.04")
        cluster = replace(cluster, on_demand=values.price, spot=None)
    return cluster, measured


def _rate(values: flags.FlagValues, name: str) -> float:
    """Returns a flag's bits per second."""
    word = str(values[name].value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", word)
    if not match or not float(match[1]):
        raise ValueError(f"--{name}={word}: give a number and its unit, such as 25gbit or 200mbit")
    return float(match[1]) * RATE[match[2]]


def _notes(cluster: clusters.Cluster, *, is_search: bool) -> list[str]:
    """Returns notes about how the program was compiled."""
    if not cluster.is_gpu:
        return []
    notes = [
        "XLA for GPUs is not installed (make .venv/h100/installed): priced from the program compiled for CPUs, which "
        "overlaps nothing, has other temporaries and names no streams; less exact"
    ] * (not targets.WHEELS.exists())
    memory = f"{format_bytes(cluster.usable_bytes(1))} of {format_bytes(cluster.device.memory_bytes)}"
    return [
        *notes,
        *[QUICK] * is_search,
        f"memory: {memory}, a choice: the rest is CUDA's, NCCL's and lost between buffers. jax takes 0.75 unless "
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 is set",
    ]
