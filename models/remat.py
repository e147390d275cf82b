"""Rematerialisation: which values of a layer the backward pass computes again, and where the others are kept."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from sharding.experts import KEPT
from sharding.trees import PyTree

# names of a transformer layer's values; KEPT are products and tokens of experts
INPUT, HEADS, ATTENTION, MLP_INPUT = "layer input", "queries, keys and values", "attention", "MLP input"
CUDNN = "dot_product_attention_fwd"  # the primitive of jax.nn.dot_product_attention(implementation="cudnn")


def named(x: Array, name: str) -> Array:
    """Returns `x` `[...]` with a name by which `rematerialise` knows it."""
    return checkpoint_name(x, name)


def rematerialise(body: Callable[..., PyTree], policy: str, *, in_scan: bool = False) -> Callable[..., PyTree]:
    """Returns a layer whose backward pass recomputes values by `policy`. `in_scan`: it is the body of a scan.

    - `full` recomputes everything from the layer's inputs.
    - `attention` saves the attention's result and the MLP's input: the MLP and the queries, keys and values are
      computed again.
    - `dots` saves products with weights, attention, and tokens exchanged between experts.
    - `none` recomputes nothing, so that the gathered parameters stay in memory.
    - `offload` saves the layer's input, queries, keys, values and attention in host memory. cuDNN's attention stays on
      the device.
    """
    if policy == "none":
        return body
    policies = jax.checkpoint_policies
    by_name = {
        "full": None,
        "attention": policies.save_only_these_names(ATTENTION, MLP_INPUT),
        "dots": policies.save_only_these_names(KEPT, ATTENTION),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[INPUT, HEADS, ATTENTION],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    if policy not in by_name:
        raise ValueError(f"model.remat = {policy!r}: choose one of {', '.join(by_name)}, none")
    saves = by_name[policy]

    def chosen(primitive: Primitive, *args: object, **how: object) -> Any:
        """Whether a value is saved, and for `offload` where. Experts mark their products, which are batched."""
        dots = policies.dots_with_no_batch_dims_saveable(primitive, *args, **how)
        is_product = primitive is jax.lax.conv_general_dilated_p or dots
        is_saved = primitive.name.startswith(CUDNN) or (policy == "dots" and is_product)
        return is_saved or (saves and saves(primitive, *args, **how))

    # in a scan, XLA cannot merge the two computations anyway
    return jax.checkpoint(body, prevent_cse=not in_scan, policy=chosen if saves else None)
