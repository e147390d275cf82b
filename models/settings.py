"""The settings of models, and their checks."""

import dataclasses

import jax.numpy as jnp

COMPUTE_DTYPES = ("float32", "bfloat16")
REMATS = ("full", "dots", "none")
ATTENTIONS = ("auto", "xla", "cudnn")


def require(holds: bool, key: str, value: object, fix: str) -> None:
    """Raises a ValueError of one line with the key, its value and what would work, unless `holds`."""
    if not holds:
        raise ValueError(f"model.{key} = {value!r}: {fix}")


def require_count(key: str, value: object) -> None:
    """Raises a ValueError unless `value` is a whole number above zero."""
    count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    require(count, key, value, "give a whole number above zero")


def require_one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises a ValueError unless `value` is one of `choices`."""
    require(value in choices, key, value, f"choose one of {', '.join(choices)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The settings that every model has; the meaning of each is in `configs/base.py`."""

    kind: str
    compute_dtype: str
    remat: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type in (int, "int"):
                require_count(field.name, getattr(self, field.name))
            if field.type in (bool, "bool"):
                value = getattr(self, field.name)
                require(isinstance(value, bool), field.name, value, "give True or False")
        require_one_of("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        require_one_of("remat", self.remat, REMATS)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype in which the model computes (parameters are float32)."""
        return jnp.dtype(self.compute_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """The settings that decoder and encoder share.

    `attention = "auto"` means `xla` here: the program that knows the devices puts `cudnn` in its place where it can.
    """

    vocab_size: int
    vocab_multiple: int
    max_len: int
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    attention: str

    def __post_init__(self) -> None:
        super().__post_init__()
        divisors = [n for n in range(1, self.hidden + 1) if self.hidden % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - self.num_heads))
        fix = f"heads must divide model.hidden = {self.hidden}; the nearest that does is {nearest}"
        require(self.hidden % self.num_heads == 0, "num_heads", self.num_heads, fix)
        require_one_of("attention", self.attention, ATTENTIONS)
        fused = self.attention != "cudnn" or self.compute_dtype == "bfloat16"
        require(fused, "attention", self.attention, "cudnn needs model.compute_dtype = 'bfloat16'; otherwise use xla")

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
