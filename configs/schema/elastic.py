"""The section `elastic`: detection of lost processes, and snapshots in memory."""

from dataclasses import dataclass

from configs.schema.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class ElasticConfig(Section):
    """Time-outs after which a process counts as lost, and snapshots in the nodes' memory."""

    SECTION = "elastic"
    RESUMABLE = True

    silence_s: float = key(
        30.0,
        "silence of a process after which the run ends (jax itself aborts after 100 s)",
        least=1,
        most=60,
        unit="s",
    )
    stall_s: float = key(
        600.0,
        "time of one step, or of reading one batch, after which the run ends; inf for no limit",
        least=1,
        unit="s",
    )
    snapshot_every: int = key(
        -1,
        "steps between snapshots in memory; -1 keeps their cost under 2 % of the time, 0 for none",
        least=-1,
        unit="steps",
    )
    memory_dir: str = key("/dev/shm", "RAM disk of each node")
