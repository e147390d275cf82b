"""Attempts of a run in any order of kills, losses and damages: each goes on from the newest step that is whole."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.keeping import Run, abstract, check, keep, state_of

from elastic import manifest
from training.resume import restore_newest


class Attempts(RuleBasedStateMachine):
    """A run, and what its memory and its checkpoints hold: steps, each of which is whole or damaged."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.run = Run(self.folder)
        self.snapshots: dict[int, bool] = {}
        self.checkpoints: dict[int, bool] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def newest(self, steps: dict[int, bool]) -> int:
        return max((step for step, is_whole in steps.items() if is_whole), default=0)

    @rule(steps=st.integers(1, 3), saves=st.booleans())
    def train(self, steps: int, saves: bool) -> None:
        """An attempt restores, trains with a snapshot after each step, saves a checkpoint or not, and is killed."""
        start, from_memory = max(self.newest(self.checkpoints), self.newest(self.snapshots)), self.from_memory
        if not start and self.checkpoints:  # none verifies: that is an error, and nothing is moved
            return
        half_written = [file.with_name("0-1-a.partial") for file in self.files()[:1]]
        for file in half_written:
            file.touch()
        with self.run.checkpoints() as checkpointer, self.run.attempt() as snapshots:
            restored = restore_newest(abstract(), checkpointer, snapshots)
            assert (restored.step if restored else 0) == start
            snapshots.begin(start)
            for step in range(start + 1, start + steps + 1):
                keep(snapshots, step, state_of(step))
        if saves:
            self.run.save(start + steps)
            self.checkpoints[start + steps] = True
        kept = {start: True} if from_memory and start else {}
        new = dict.fromkeys(range(start + 1, start + steps + 1), True)
        self.snapshots = dict(sorted((kept | new).items())[-2:])
        self.checkpoints = {step: is_whole for step, is_whole in self.checkpoints.items() if is_whole or step <= start}
        assert not any(file.exists() for file in half_written)
        assert len(self.run.files("data")) == len(self.run.files("json")) == len(self.snapshots)

    def files(self) -> list[Path]:
        return self.run.files("json") if self.snapshots else []

    @property
    def from_memory(self) -> bool:
        return self.newest(self.snapshots) >= self.newest(self.checkpoints)

    @precondition(lambda self: self.snapshots)
    @rule()
    def lose_memory(self) -> None:
        """The node is replaced."""
        shutil.rmtree(next(self.run.memory.glob("mics-jax-*")))
        self.snapshots = {}

    @precondition(lambda self: self.newest(self.snapshots))
    @rule(ending=st.sampled_from(["data", "json"]))
    def damage_snapshot(self, ending: str) -> None:
        step = self.newest(self.snapshots)
        (file,) = [f for f in self.run.files("json") if f'"step": {step},' in f.read_text().partition("tree")[0]]
        file = file.with_suffix(f".{ending}")
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
        self.snapshots[step] = False

    @precondition(lambda self: self.newest(self.checkpoints))
    @rule()
    def damage_checkpoint(self) -> None:
        step = self.newest(self.checkpoints)
        (self.run.workdir / "checkpoints" / str(step) / manifest.DATA_FILE).write_text("{}")
        self.checkpoints[step] = False

    @invariant()
    def goes_on_from_the_newest_step_that_is_whole(self) -> None:
        step = max(self.newest(self.checkpoints), self.newest(self.snapshots))
        if step:
            source = {} if self.from_memory else {"source": "its checkpoint"}
            check(self.run.restore(), step, **source)
            self.checkpoints = {s: is_whole for s, is_whole in self.checkpoints.items() if is_whole or s <= step}


TestAttempts = Attempts.TestCase
TestAttempts.settings = settings(
    max_examples=12,
    stateful_step_count=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[*HealthCheck],
)
