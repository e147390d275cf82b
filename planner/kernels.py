"""Work of one kernel of a compiled program: matrix products, functions, and bytes of memory.

The body of a fusion is inspected: a parameter that is only sliced counts as the slice, and a stack that is updated in
place counts as the slice that changes.
"""

import re
from collections.abc import Sequence
from math import prod

import numpy as np

from planner.clusters import DeviceSpec, Product
from sharding.hlo import KINDS
from sharding.hlo_program import ArrayType, Computation, Instruction, Program, Type, num_bytes, tensors

NO_KERNELS = """
    parameter constant tuple get-tuple-element bitcast reshape after-all opt-barrier partition-id replica-id
    add-dependency copy-done async-update domain
"""
FREE = frozenset(NO_KERNELS.split())
ALLOCATE = '"AllocateBuffer"'  # a custom call that only reserves memory, for values on the host
_RENAMING = ("bitcast", "reshape")  # the same bytes under another name
_OF_TRANSFERS = ('"AsyncCollectiveStart"', '"AsyncCollectiveDone"')
_PRODUCTS = ("dot", "convolution", "custom-call")
# products over all pairs of positions in a library's kernels, and in ours (which compute the scores and their
# gradients twice in the backward pass: seven products)
ATTENTION = {"forward": 2, "backward": 5, "queries": 2, "keys": 3}
SPLASH = {"fwd": 2, "dq": 3, "dkv": 4}  # the same in jax's splash kernels for TPUs
FUSED = 1  # further products of the last one, if it computes the gradients of queries as well
WINDOW_STEPS = ("stride", "rhs_dilate", "lhs_dilate")  # in the output, the kernel and the input of a convolution
FUNCTIONS = """
    exponential exponential-minus-one log log-plus-one logistic tanh erf power sine cosine tan cbrt
"""
_FUNCTIONS = frozenset(FUNCTIONS.split())


def kernel_s(instruction: Instruction, computation: Computation, program: Program, device: DeviceSpec) -> float:
    """Returns the seconds of an instruction of `computation`: the longest of its products, functions and bytes.

    It is 0 for instructions that are not kernels (a tuple, a bitcast, ...).
    """
    if instruction.opcode in FREE or instruction.attributes.get("custom_call_target") == ALLOCATE:
        return 0.0
    found = products(instruction, computation, program)
    products_s = sum(device.product_s(product) for product in found)
    functions_s = num_functions(instruction, program) / device.functions_per_s
    memory_s = moved_bytes(instruction, computation, program) / device.memory_bandwidth
    return device.launch_s + max(products_s, functions_s, memory_s)


# ------------------------------------------------------------------------------------------- operations


def products(instruction: Instruction, computation: Computation, program: Program) -> list[Product]:
    """Returns the matrix products of a kernel; an attention kernel counts as a single product."""
    if instruction.opcode == "fusion":
        called = program.called(instruction.calls[0], instruction)
        return [found for inside in called.instructions for found in products(inside, called, program)]
    if instruction.opcode not in _PRODUCTS or not instruction.operands:
        return []
    result = tensors(instruction.result)[0]
    if "grouped_" in instruction.attributes.get("backend_config", ""):  # a kernel of models/grouped.py
        rows = tensors(_type(computation, instruction.operands[-2]))[0]
        return [Product(dtype=rows.dtype, flops=2 * rows.num_elements * result.dims[-1])]
    operands = [_type(computation, name) for name in instruction.operands[:2]]
    if len(operands) < 2 or not all(isinstance(operand, ArrayType) for operand in operands):
        return []
    left, right = operands
    assert isinstance(left, ArrayType) and isinstance(right, ArrayType)
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    found = _attention(instruction, computation, target, left) or _product(instruction, target, left, right, result)
    return [found] if found and found.flops else []


def _attention(instruction: Instruction, computation: Computation, target: str, queries: ArrayType) -> Product | None:
    """Returns the products of an attention kernel over pairs of positions: cuDNN's, splash, or of models/flash.py.

    With a causal mask half of the pairs count.
    """
    config = instruction.attributes.get("backend_config", "").replace("\\", "")
    if "fmha" in target:
        pairs = _numbers(config, r'"intermediate_tensor_shape":\{.*?"dimensions":\[([^\]]*)\]')
        part, is_causal = "backward" if "Backward" in target else "forward", '"mask_type":"CAUSAL"' in config
        head, dtype = queries.dims[-1], queries.dtype
    elif name := re.search(r'name = "flash_(\w+?)(_causal)?"', config):
        batch, length, heads, head = queries.dims
        pairs, part, is_causal, dtype = [batch, heads, length, length], name[1], bool(name[2]), queries.dtype
    elif found := re.match(r"splash_m[hq]a_(fwd|dq|dkv)", instruction.name):
        return _splash(instruction, found[1], computation)
    else:
        return None
    flops = 2 * ATTENTION[part] * (0.5 if is_causal else 1) * prod(pairs) * head if pairs else 0
    return Product(dtype=dtype, flops=flops, part="forward" if part == "forward" else "backward")


def _splash(instruction: Instruction, part: str, computation: Computation) -> Product:
    """Returns the products of a splash kernel. Its first arrays of floats are queries and keys, `[..., N, T, H]`.

    Integers before them tell which blocks a mask leaves: half of the pairs, for a causal one.
    """
    arrays = [array for name in instruction.operands for array in tensors(_type(computation, name))]
    queries, keys = [array for array in arrays if array.dtype[0] in "fb"][:2]
    products = SPLASH[part] + FUSED * (
        part == "dkv" and 'use_fused_bwd_kernel\\": true' in instruction.written_attributes
    )
    is_masked = arrays[0] is not queries
    flops = 2 * products * (0.5 if is_masked else 1) * queries.num_elements * keys.dims[-2]
    return Product(dtype=queries.dtype, flops=flops, part="forward" if part == "fwd" else "backward")


def _product(
    instruction: Instruction, target: str, left: ArrayType, right: ArrayType, result: ArrayType
) -> Product | None:
    """Returns a product or a convolution: a multiplication and an addition for each term of a sum."""
    if instruction.opcode == "dot":
        contracted = _numbers(instruction.attributes.get("lhs_contracting_dims", ""), r"\{([^}]*)\}")
        return _matmul(left, result, contracted)
    if "gemm" in target or "matmul" in target:
        config = instruction.attributes.get("backend_config", "").replace("\\", "")
        contracted = _numbers(config, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
        return _matmul(left, result, contracted or [len(left.dims) - 1])
    labels = instruction.attributes.get("dim_labels", "")
    if labels and (instruction.opcode == "convolution" or "conv" in target):
        kernel = result if "BackwardFilter" in target else right
        image = {"BackwardFilter": right, "BackwardInput": left}.get(target.removeprefix("__cudnn$conv"), result)
        features = kernel.dims[labels.split("_")[1].split("-")[0].index("o")]
        flops = 2 * image.num_elements * kernel.num_elements / features
        return Product(dtype=left.dtype, flops=flops * _filled(instruction, labels, left, result))
    return None


def _filled(instruction: Instruction, labels: str, image: ArrayType, result: ArrayType) -> float:
    """Returns the share of a convolution's terms that are not padding.

    XLA for TPUs writes a product with a batch dim, or with one more dim of outputs, as a convolution over a dilated or
    padded dim. All but one of the terms in a window are padding, which XLA's own count of operations leaves out.
    """
    window = dict(re.findall(r"(\w+)=([-\dx_]+)", instruction.attributes.get("window", "")))
    if instruction.opcode != "convolution" or not window:
        return 1.0
    sizes = [int(size) for size in window["size"].split("x")]
    settings = {key: value.split("x") for key, value in window.items()}
    of_image, of_result = labels.split("_")[0], labels.split("->")[1]
    share = 1.0
    for n, size in enumerate(sizes):
        stride, dilation, spread = (int(settings.get(k, ["1"] * (n + 1))[n]) for k in WINDOW_STEPS)
        before = int(settings.get("pad", ["0_0"] * (n + 1))[n].split("_")[0])
        outputs, end = result.dims[of_result.index(str(n))], image.dims[of_image.index(str(n))] * spread
        places = np.add.outer(stride * np.arange(outputs), dilation * np.arange(size)) - before
        share *= float(np.mean((places >= 0) & (places < end) & (places % spread == 0)))
    return share


def _matmul(left: ArrayType, result: ArrayType, contracted: Sequence[int]) -> Product:
    terms = prod(left.dims[i] for i in contracted)
    return Product(dtype=left.dtype, flops=2 * result.num_elements * terms)


def num_functions(instruction: Instruction, program: Program) -> int:
    """Returns the number of exp, tanh and similar values that a kernel computes."""
    if instruction.opcode == "fusion":
        called = program.called(instruction.calls[0], instruction)
        return sum(num_functions(inside, program) for inside in called.instructions)
    return tensors(instruction.result)[0].num_elements if instruction.opcode in _FUNCTIONS else 0


def _numbers(text: str, pattern: str) -> list[int]:
    found = re.search(pattern, text)
    return [int(n) for n in re.findall(r"\d+", found.group(1))] if found else []


# ------------------------------------------------------------------------------------------- bytes


def moved_bytes(instruction: Instruction, computation: Computation, program: Program) -> float:
    """Returns the bytes that a kernel reads and writes in the device's memory."""
    if instruction.opcode == "fusion":
        called = program.called(instruction.calls[0], instruction)
        read = sum(_read_bytes(parameter, called, program) for parameter in called.parameters.values())
        return read + (_written_bytes(called.root, called) if called.root else num_bytes(instruction.result))
    operands = [num_bytes(_type(computation, name)) for name in instruction.operands]
    result = sum(array.num_bytes for array in _results(instruction))
    if instruction.opcode == "copy-start":
        return 2 * operands[0]
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1]
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * result
    if instruction.opcode == "scatter":
        return sum(operands[1:]) + operands[-1]
    return sum(operands) + result


def _results(instruction: Instruction) -> list[ArrayType]:
    """Returns the outputs of a kernel, without the workspace of a library's kernel."""
    arrays = tensors(instruction.result)
    is_library = instruction.opcode == "custom-call" and len(arrays) > 1
    return [array for array in arrays if not (is_library and array.dtype in ("s8", "u8"))]


def _read_bytes(value: Instruction, computation: Computation, program: Program) -> float:
    """Returns the bytes of a fusion's parameter that it reads."""
    whole, read = num_bytes(value.result), 0.0
    for user in computation.users.get(value.name, ()):
        first = user.operands[0] == value.name and value.name not in user.operands[1:]
        if user.opcode in KINDS or user.attributes.get("custom_call_target", "") in _OF_TRANSFERS:
            continue  # the network moves them
        if user.opcode in ("slice", "dynamic-slice", "gather") and first:
            read += num_bytes(user.result)
        elif user.opcode in ("dynamic-update-slice", "scatter") and first:
            continue  # in place
        elif user.opcode in (*_RENAMING, "get-tuple-element"):
            read += _read_bytes(user, computation, program)
        elif user.opcode == "fusion":
            called = program.called(user.calls[0], user)
            numbers = [n for n, operand in enumerate(user.operands) if operand == value.name]
            read += sum(_read_bytes(called.parameters[n], called, program) for n in numbers)
        elif user.opcode != "tuple":
            return whole
    return min(read, whole)


def _written_bytes(value: Instruction, computation: Computation) -> float:
    """Returns the bytes that a fusion writes, whose result is `value`."""
    if value.opcode == "tuple":
        return sum(_written_bytes(computation.by_name[name], computation) for name in value.operands)
    if value.opcode in _RENAMING:
        return _written_bytes(computation.by_name[value.operands[0]], computation)
    if value.opcode == "dynamic-update-slice":
        return num_bytes(_type(computation, value.operands[1]))
    if value.opcode == "scatter":
        return num_bytes(_type(computation, value.operands[-1]))
    return 0.0 if value.opcode == "parameter" or value.opcode in KINDS else num_bytes(value.result)


def _type(computation: Computation, name: str) -> Type:
    return computation.by_name[name].result if name in computation.by_name else ()
