"""Which of our parameters is which tensor of transformers, by the table of an architecture (configs/hugging_face.py).

Ours are stacked, `[L, ...]`, and multiply from the right, `x @ weight`. Theirs are one per layer; torch's Linear keeps
`[out, in]`, GPT-2's Conv1D `[in, out]` as we do, with query, key and value side by side in one tensor. Heads are in the
same order, and both pair dim `i` of a head with `i + H/2` in rotary positions, so that no tensor is permuted.
"""

import re
from dataclasses import dataclass

from configs.hugging_face import Architecture
from configs.schema import TransformerConfig
from models.model import Model
from sharding.spec import ParamSpec
from sharding.state import by_name

# behind a name of the table, theirs and ours: tables of embeddings stand there whole, of modules follow the parameters
ENDS = (("", ""), (".weight", "/weight"), (".weight", "/scale"), (".bias", "/bias"))


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One of our parameters, and the tensor or tensors of transformers that hold it."""

    path: str  # ours
    name: str  # theirs, `{}` for the number of the layer
    transposed: bool
    part: int  # theirs has `parts` of ours side by side in its last dim; this is number `part`
    parts: int
    spec: ParamSpec
    shape: tuple[int, ...]  # of one layer, if stacked, and without the padding of the vocabulary

    @property
    def layers(self) -> tuple[int | None, ...]:
        """The numbers of the layers of a stack, else one None."""
        return tuple(range(self.spec.shape[0])) if self.spec.dims[0] == "layers" else (None,)

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape of each tensor of transformers."""
        whole = (*self.shape[:-1], self.shape[-1] * self.parts)
        return whole[::-1] if self.transposed else whole

    def name_in(self, layer: int | None) -> str:
        """Returns the name of the tensor that holds a layer."""
        return self.name.format(layer)


def tensors(model: Model, architecture: Architecture) -> dict[str, Tensor]:
    """Returns the parameters of a model by our path, in the order of the table."""
    assert isinstance(model.config, TransformerConfig)
    specs: dict[str, ParamSpec] = by_name(model.param_specs(), lambda x: isinstance(x, ParamSpec))
    vocab_size, found = model.config.vocab_size, {}
    for name, ours in architecture.tensors.items():
        modules = ours.split()
        for their_end, our_end in ENDS:
            for part, path in enumerate(f"{module}{our_end}" for module in modules):
                if (spec := specs.get(path)) is None:  # a bias, or an untied head, is not in every model
                    continue
                shape = tuple(vocab_size if dim == "vocab" else n for dim, n in zip(spec.dims, spec.shape, strict=True))
                stacked = spec.dims[0] == "layers"
                found[path] = Tensor(
                    path=path,
                    name=f"{name}{their_end}",
                    transposed=our_end == "/weight" and not (architecture.conv1d and stacked),
                    part=part,
                    parts=len(modules),
                    spec=spec,
                    shape=shape[stacked:],
                )
    assert found.keys() == specs.keys(), found.keys() ^ specs.keys()
    return found


def ignored(model: Model, architecture: Architecture, name: str) -> bool:
    """Whether a tensor of a checkpoint is none of the model's: buffers, heads of other tasks, copies of a tied head."""
    tied = getattr(model.config, "tied_head", True) and name == "lm_head.weight"
    return tied or re.fullmatch(architecture.ignored, name) is not None


def spellings(architecture: Architecture, name: str) -> tuple[str, ...]:
    """Returns the names under which a tensor may be found: without the prefix, and with TensorFlow's names of norms."""
    found = (name, name.removeprefix(architecture.prefix))
    old = (x.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta") for x in found)
    return (*found, *old)
