"""Values of transformers' `config.json` as keys of our model section, and back: activations, positions, windows."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.schema import DecoderConfig, TransformerConfig
from configs.schema.keys import keys_of
from runtime.files.json_objects import JsonMapping, JsonObject

# transformers' name: our name; the first name with our value is written
ACTIVATIONS = {"gelu_new": "gelu", "gelu": "gelu_exact", "gelu_pytorch_tanh": "gelu"}
FULL, SLIDING = "full_attention", "sliding_attention"
ROTARY = (
    *("rotary_base", "rotary_scaling", "rotary_factor"),
    *("rotary_low", "rotary_high", "rotary_original_len", "rotary_attention", "rotary_truncate"),
)
UNUSED_FROM = {"none": 2, "linear": 3, "llama3": 6, "yarn": 8}  # the first of ROTARY that has no effect
# a decoder without anything that only some architectures have
PLAIN = {
    name: declared.default
    for name, declared in keys_of(DecoderConfig).items()
    if name in ("head_dim", "window", "global_every", "qk_norm", "qk_norm_whole", "query_scalar")
    or name in ("attention_cap", "attention_sinks", "logit_cap", "post_norm", "scale_embedding", "qkv_bias")
    or name in ("attention_bias", "use_bias", "rotary_local_base", *ROTARY)
}


@dataclass(frozen=True)
class Field:
    """A value of `config.json`: equal to ours, unless a function converts it; without a default it is required."""

    ours: str  # a key of our model section; "" for a value that is only written
    name: str = ""  # transformers' key, if it differs
    default: Any = None
    read: Callable[[JsonMapping], Any] | None = None  # from the whole of config.json
    write: Callable[[TransformerConfig], object] | None = None  # from our whole section

    @property
    def theirs(self) -> str:
        """Its name in `config.json`."""
        return self.name or self.ours

    def of_theirs(self, values: JsonMapping) -> Any:
        """Returns our value. KeyError if it is missing."""
        if self.read:
            return self.read(values)
        return values[self.theirs] if self.default is None else values.get(self.theirs, self.default)

    def of_ours(self, config: TransformerConfig) -> Any:
        """Returns the value for `config.json`."""
        return self.write(config) if self.write else getattr(config, self.ours)


def activation_field(theirs: str, default: str) -> Field:
    """Returns the field of the activation, whose key is `theirs`."""

    def read(values: JsonMapping) -> str:
        name = values.get(theirs, default)
        if name not in tuple(ACTIVATIONS):  # it may be a list, which is not hashable
            raise ValueError(f"an activation {name!r} is not supported; one of {', '.join(ACTIVATIONS)} is")
        return ACTIVATIONS[name]

    def write(c: TransformerConfig) -> str:
        return next((name for name, ours in ACTIVATIONS.items() if ours == c.activation), "gelu_new")

    return Field("activation", theirs, read=read, write=write)


def dropout_field(ours: str, theirs: str, default: float = 0.0) -> Field:
    """Returns the field of a rate of dropout, whose default in transformers is `default`."""
    return Field(ours, theirs, read=lambda values: _real(values, theirs, default))


def number(values: JsonMapping, name: str, default: Any = None, *, least: int = 1, kind: Any = int) -> Any:
    """Returns a value to compute with, before our own keys are checked; null counts as absent."""
    value = default if values.get(name) is None else values[name]
    if value is None:
        raise KeyError(name)
    if not isinstance(value, kind) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, not {'an integer' if kind is int else 'a number'} from {least} on")
    return value


def _real(values: JsonMapping, name: str, default: float | None = None) -> float:
    return float(number(values, name, default, least=0, kind=(int, float)))


def _object(values: JsonMapping, name: str) -> JsonMapping:
    """Returns an object of `config.json`; null and absent ones are empty."""
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{name} is {found!r}, not an object")
    return found


def read_rope(values: JsonMapping) -> JsonMapping:
    """Returns our keys of rotary positions, equal for all layers; as in transformers the older object wins."""
    return _rotary(values, _object(values, "rope_scaling") or _object(values, "rope_parameters"))


def _rotary(values: JsonMapping, rope: JsonMapping, base: float = 10_000.0) -> dict[str, object]:
    """Returns our keys of rotary positions, from transformers' `rope` object and, for missing keys, `config.json`."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(
            f"rotary positions of rope_type {kind!r} are not supported; default, linear, llama3 and yarn are"
        )
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"partial_rotary_factor={rope['partial_rotary_factor']} is not supported; 1 is")
    found: JsonObject = {name: PLAIN[name] for name in ROTARY}
    found["rotary_base"] = _real(rope, "rope_theta", _real(values, "rope_theta", base))
    if kind != "default":
        found |= {"rotary_scaling": kind, "rotary_factor": _real(rope, "factor")}
    if kind == "llama3":
        found |= {"rotary_low": _real(rope, "low_freq_factor"), "rotary_high": _real(rope, "high_freq_factor")}
    if kind == "yarn":
        found |= {"rotary_low": _real(rope, "beta_slow", 1.0), "rotary_high": _real(rope, "beta_fast", 32.0)}
        found["rotary_attention"] = _yarn_attention(rope)
        found["rotary_truncate"] = bool(rope.get("truncate", True))
    if kind in ("llama3", "yarn"):
        length = "original_max_position_embeddings"
        found["rotary_original_len"] = number(rope, length, values.get("max_position_embeddings"))
    return found


def _yarn_attention(rope: JsonMapping) -> float:
    """Returns YaRN's factor of rotated queries and keys: `0.1 ln(factor) + 1`, unless `rope` has another one."""
    factor = _real(rope, "factor")

    def attention(name: str) -> float:
        return 0.1 * _real(rope, name, 1.0) * math.log(factor) + 1 if factor > 1 else 1.0

    has_scales = rope.get("mscale") and rope.get("mscale_all_dim")
    default = attention("mscale") / attention("mscale_all_dim") if has_scales else attention("")
    return _real(rope, "attention_factor", default)


def scaling_json(c: TransformerConfig) -> dict[str, object] | None:
    """Returns `rope_scaling`, which versions of transformers before 5 read."""
    if c.rotary_scaling == "none":
        return None
    found = {"rope_type": c.rotary_scaling, "factor": c.rotary_factor}
    if c.rotary_scaling == "llama3":
        found |= {"low_freq_factor": c.rotary_low, "high_freq_factor": c.rotary_high}
    if c.rotary_scaling == "yarn":
        found |= {"beta_slow": c.rotary_low, "beta_fast": c.rotary_high, "attention_factor": c.rotary_attention}
        found |= {} if c.rotary_truncate else {"truncate": False}  # transformers before 4.55 has no such key
    if c.rotary_scaling in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = c.rotary_original_len
    return found


def rope_json(c: TransformerConfig) -> dict[str, object]:
    """Returns `rope_parameters`, which transformers reads from version 5 on."""
    return {"rope_type": "default", "rope_theta": c.rotary_base} | (scaling_json(c) or {})


def _gemma3_rope(values: JsonMapping) -> JsonMapping:
    """Returns our keys of rotary positions, of layers with a window and others."""
    rope = _object(values, "rope_parameters")
    full = {**_object(rope, FULL), **_object(values, "rope_scaling")}
    local = _rotary({}, _object(rope, SLIDING), _real(values, "rope_local_base_freq", 10_000.0))
    if local["rotary_scaling"] != "none":
        raise ValueError(f"{SLIDING} of rope_type {local['rotary_scaling']!r} is not supported; default is")
    return _rotary(values, full, 1e6) | {"rotary_local_base": local["rotary_base"]}


def read_gemma3(values: JsonMapping) -> JsonMapping:
    """Returns our keys of rotary positions and windows; layers with a window have a separate base.

    If all layers are alike, they share one base.
    """
    rope, windows = _gemma3_rope(values), read_windows(values, number(values, "sliding_window_pattern", 6))
    if windows["window"] and not windows["global_every"]:
        rope = {name: PLAIN[name] for name in ROTARY} | {"rotary_base": rope["rotary_local_base"]}
    return {**rope, **windows} | ({} if windows["global_every"] else {"rotary_local_base": 0.0})


def local_base(c: TransformerConfig) -> float:
    """Returns the base of the frequencies in layers with a window."""
    return c.rotary_local_base or c.rotary_base


def gemma3_rope_json(c: TransformerConfig) -> dict[str, object]:
    """Returns `rope_parameters` with an object for each kind of layer."""
    return {FULL: rope_json(c), SLIDING: {"rope_type": "default", "rope_theta": local_base(c)}}


def read_windows(values: JsonMapping, every: int = 0) -> JsonMapping:
    """Returns our keys of windows; every `every`-th layer has none, unless `layer_types` differs."""
    window, count = values.get("sliding_window", 4096), number(values, "num_hidden_layers")
    is_global = [every > 0 and i % every == 0 for i in range(1, count + 1)]
    if types := values.get("layer_types"):
        if not isinstance(types, list) or any(kind not in (FULL, SLIDING) for kind in types):
            raise ValueError(f"layer_types is {types!r}, not a list of {FULL} and {SLIDING}")
        is_global = [kind == FULL for kind in types]
    if all(is_global) or (window is None and not every):
        return {"window": 0, "global_every": 0}
    if window is None:  # which transformers does not compute either
        raise KeyError("sliding_window")
    every = is_global.index(True) + 1 if True in is_global else 0
    if is_global != [every > 0 and i % every == 0 for i in range(1, count + 1)]:
        raise ValueError(f"layer_types is not supported in which {FULL} is not in each layer of a multiple of a number")
    return {"window": window, "global_every": every}


def read_mistral(values: JsonMapping) -> JsonMapping:
    """Returns our keys of rotary positions and windows, which all layers have: transformers ignores `layer_types`."""
    windows = read_windows({**values, "layer_types": None})
    if values.get("layer_types") and read_windows(values) != windows:
        raise ValueError("layer_types is not supported with another sliding_window: all layers of mistral have it")
    return {**read_rope(values), **windows}


def layer_types(c: TransformerConfig) -> list[str]:
    """Returns the kind of attention of each layer."""
    is_global = [not c.window or (c.global_every and i % c.global_every == 0) for i in range(1, c.num_layers + 1)]
    return [FULL if it_is else SLIDING for it_is in is_global]


def head_dim_field(default: int = 0) -> Field:
    """Returns the field of the size of a head; our 0 is hidden / heads, as in transformers without a `default`."""

    def read(values: JsonMapping) -> int:
        num_heads, hidden = number(values, "num_attention_heads"), number(values, "hidden_size")
        size = number(values, "head_dim", default or hidden // num_heads)
        return 0 if size == hidden // num_heads else size

    return Field("head_dim", read=read, write=lambda c: c.head_size)


def query_scalar(values: JsonMapping) -> int:
    """Returns our key; 0 for the size of a head."""
    scalar = number(values, "query_pre_attn_scalar", 256)
    return 0 if scalar == number(values, "head_dim", 256) else scalar


def cap_field(ours: str, theirs: str, default: float) -> Field:
    """Returns the field of a soft cap; our 0 is null in transformers."""

    def read(values: JsonMapping) -> float:
        return 0.0 if values.get(theirs, default) is None else _real(values, theirs, default)

    return Field(ours, theirs, read=read, write=lambda c: getattr(c, ours) or None)


def use_bias(values: JsonMapping) -> object:
    """Returns our key. ValueError for biases in MLPs alone."""
    if values.get("mlp_bias", False) and not values.get("attention_bias", False):
        raise ValueError("mlp_bias without attention_bias is not supported")
    return values.get("mlp_bias", False)


def position_offset(values: JsonMapping) -> int:
    """Returns the row of RoBERTa's first position, which follows the row of padding."""
    return number(values, "pad_token_id", 1, least=0) + 1
