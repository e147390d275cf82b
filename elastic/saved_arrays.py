"""Reads selected arrays of a checkpoint, without the program that saved it."""

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from elastic import manifest, tree
from elastic.quiet import quiet_orbax
from runtime.files import json_objects
from sharding.trees import PyTree


class SavedArrays:
    """The arrays of one verified step in a directory of checkpoints."""

    def __init__(self, directory: Path, step: int | None = None) -> None:
        """Opens a step, by default the newest, and verifies all of its files.

        ValueError if the step does not exist or is damaged, OSError if a file cannot be read.
        """
        steps = manifest.step_numbers(directory)
        if not steps:
            raise ValueError(f"{directory} holds no checkpoint")
        self.step = steps[-1] if step is None else step
        if self.step not in steps:
            raise ValueError(f"{directory} holds no step {step}; its steps are {', '.join(map(str, steps))}")
        self._folder = directory.absolute() / str(self.step)  # Orbax requires an absolute path
        try:
            found = manifest.verify(self._folder)
        except manifest.DamagedError as error:
            raise ValueError(f"{self._folder} is damaged: {error}; choose another --step") from error
        self._leaves = {leaf.path: leaf for leaf in found.tree}
        self.config = json_objects.read(self._folder / manifest.CONFIG_FILE, lenient=True)
        self.data = json_objects.read(self._folder / manifest.DATA_FILE, lenient=True)
        quiet_orbax()

    @property
    def paths(self) -> list[str]:
        """The paths of all arrays, such as `params.layers.query.weight`."""
        return [*self._leaves]

    def read(self, *paths: str) -> list[np.ndarray]:
        """Returns the whole arrays at these paths."""
        abstract = {path: jax.ShapeDtypeStruct(self._leaves[path].shape, self._leaves[path].dtype) for path in paths}
        how = {path: ocp.RestoreArgs(restore_type=np.ndarray) for path in paths}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            restored = reader.restore(
                self._folder / "state",
                args=ocp.args.PyTreeRestore(item=abstract, restore_args=how, partial_restore=True),
            )
        return [np.asarray(restored[path]) for path in paths]

    def place(self, abstract: PyTree) -> PyTree:
        """Returns a part of the state, given as jax.ShapeDtypeStructs with shardings on any mesh.

        ValueError if it differs.
        """
        wanted = tree.flatten_abstract(abstract)
        leaves = tuple(leaf for path, leaf in self._leaves.items() if path in wanted)
        if different := tree.difference(self._folder, leaves, wanted):
            raise ValueError(different)
        arrays = tree.load(self._folder / "state", wanted, leaves)
        return jax.tree.unflatten(jax.tree.structure(abstract), arrays)
