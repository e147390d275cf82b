"""Codecs with numpy and with jax, against ten lines of numpy each: bytes sent, values that arrive, size claimed."""

import subprocess
import sys
from collections.abc import Callable
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from support import workload
from support.our_files import ROOT
from support.tables import every_row

from compression.chosen_codecs import make_codec
from compression.codecs import BODIES, NF4, Blockwise, decode_matrices, encode_matrices
from configs import base
from configs.schema import CompressionConfig
from configs.schema.codecs import BASES, COLUMNS, TABLE
from configs.schema.sections import CODECS
from elastic.replicas.payloads import Payload
from sharding.coded import Codec

BLOCK = 32
Function = Callable[[np.ndarray], np.ndarray]


def jitted(function: Callable[..., jax.Array], *more: object) -> Function:
    return lambda x: np.asarray(jax.jit(function)(x, *more))


def functions(name: str, library: str) -> tuple[Function, Function]:
    """Returns `encode` and `decode` of a codec, with a library's arrays."""
    codec = BODIES[name](BLOCK)
    return (codec.encode, codec.decode) if library == "numpy" else (jitted(codec.encode, KEY), jitted(codec.decode))


every_codec = every_row(("name", "library"), [*product(TABLE, ("numpy", "jax"))])
KEY = jax.random.key(0)


def rows(count: int = 3, size: int = 4 * BLOCK) -> np.ndarray:
    """Rows with a block of zeros, a constant block, large and tiny numbers, both ends of a range."""
    x = np.random.default_rng(0).normal(size=(count, size)).astype(np.float32)
    x[0, :BLOCK] = 0
    x[1, :BLOCK] = -3.25
    x[2, :BLOCK] *= 1e20
    x[2, BLOCK : 2 * BLOCK] *= 1e-20
    return x


def none(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x.view(np.uint8), x


def bf16(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The upper 16 bits, to the nearest, ties to even."""
    bits = x.view(np.uint32)
    upper = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return upper.view(np.uint8), (upper.astype(np.uint32) << 16).view(np.float32)


def blockwise(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    most = 2 ** (bits - 1) - 1
    blocks = x.reshape(len(x), -1, BLOCK)
    scales = np.abs(blocks).max(-1, keepdims=True) * np.float32(1 / most)
    integers = np.round(blocks / np.where(scales > 0, scales, 1)).astype(np.int8)
    flat = integers.reshape(x.shape).view(np.uint8)
    if bits == 4:
        half = x.shape[1] // 2
        flat = (flat[:, :half] & 15) | (flat[:, half:] << 4)
    sent = np.concatenate([flat, scales.reshape(len(x), -1).view(np.uint8)], axis=1)
    return sent, (integers * scales).reshape(x.shape).astype(np.float32)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """A byte has a code of each part of a row, the first one's lowest."""
    parts = codes.astype(np.uint8).reshape(len(codes), 8 // bits, -1)
    return np.bitwise_or.reduce([parts[:, i] << bits * i for i in range(8 // bits)])


def one_bit(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales = np.abs(x).reshape(len(x), -1, BLOCK).mean(-1, dtype=np.float32)
    sent = np.concatenate([packed(x >= 0, 1), scales.view(np.uint8)], axis=1)
    return sent, np.where(x >= 0, 1, -1) * np.repeat(scales, BLOCK, axis=1)


def statistical(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two means for the magnitudes of a block, separated at 1.23 times the mean of all."""
    sizes = np.abs(x).reshape(len(x), -1, BLOCK)
    large = sizes > np.float32(1.23) * sizes.mean(-1, keepdims=True)
    means = np.stack([np.ma.array(sizes, mask=mask).mean(-1).filled(0) for mask in (large, ~large)], axis=-1)
    codes = packed((x >= 0) + 2 * large.reshape(x.shape), 2)
    values = np.where(large, means[..., 1:], means[..., :1]).reshape(x.shape) * np.where(x >= 0, 1, -1)
    return np.concatenate([codes, means.astype(np.float32).reshape(len(x), -1).view(np.uint8)], axis=1), values


ORACLES = {
    "none": none,
    "bf16": bf16,
    "int8": lambda x: blockwise(x, 8),
    "int4": lambda x: blockwise(x, 4),
    "one_bit": one_bit,
    "statistical": statistical,
}


@every_codec
def test_codecs_match_ten_lines(name: str, library: str) -> None:
    """Sent bits are equal; decoded values are equal up to rounding (a mean may be summed in another order)."""
    (encode, decode), x = functions(name, library), rows()
    sent, (wanted_sent, wanted) = encode(x), ORACLES[name](x)
    assert sent.dtype == np.uint8 and sent.shape == wanted_sent.shape
    assert sent.size == TABLE[name].bytes_per_value(BLOCK) * x.size
    more_dims = encode(x.reshape(3, 2, -1)[:, None])  # of shorter rows, too
    each = np.concatenate([encode(row[None]) for row in x.reshape(6, -1)])
    np.testing.assert_array_equal(more_dims.reshape(each.shape), each)
    if name in ("one_bit", "statistical"):
        signs = x.shape[1] // (8 if name == "one_bit" else 4)
        np.testing.assert_array_equal(sent[:, :signs], wanted_sent[:, :signs])
    else:
        np.testing.assert_array_equal(sent, wanted_sent)
    decoded = decode(sent)
    assert decoded.dtype == np.float32
    np.testing.assert_allclose(decoded, wanted, rtol=1e-6)


@every_codec
def test_finite_values_stay_finite(name: str, library: str) -> None:
    """Up to the largest numbers; infinity and NaN do not become finite, and no other block becomes so."""
    (encode, decode), largest = functions(name, library), np.finfo(np.float32).max
    x = np.float32([[largest, -largest, 3.39e38, 1.0] * (BLOCK // 2)])
    arrived = decode(encode(x))
    assert np.isfinite(arrived).all()
    if name in CODECS:
        np.testing.assert_allclose(arrived[0, :2], x[0, :2], rtol=0.01)
    for bad in (np.inf, -np.inf, np.nan):
        x[0, BLOCK + 1] = bad
        arrived = decode(encode(x))
        assert np.isfinite(arrived[0, :BLOCK]).all() and not np.isfinite(arrived[0, BLOCK + 1])
        if name in ("int8", "int4"):
            assert np.isnan(arrived[0, BLOCK:]).all()


@every_row(("name", "least"), [("bf16", 2), ("int8", 3.8), ("int4", 7.5), ("statistical", 15.5)])
def test_default_compression_ratios(name: str, least: float) -> None:
    config = CompressionConfig(**base.get_config().compression)
    codec = make_codec(name, config)
    assert codec is not None and 4 * 2**20 / workload.payload_bytes(codec, 2**20) >= least
    assert workload.payload_bytes(codec, 2**20) == TABLE[name].bytes_per_value(config.block) * 2**20


@every_row("bits", [8, 4])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    """The mean over 4000 roundings is within 5 standard errors of the value; to the nearest it is not."""
    x, keys = jnp.asarray(rows()[2:, 2 * BLOCK :]), jax.random.split(KEY, 4000)

    def arrived(codec: Codec) -> np.ndarray:
        return np.asarray(jax.jit(jax.vmap(lambda key: codec.decode(codec.encode(x, key))))(keys))

    values = arrived(Blockwise(bits=bits, block=BLOCK, stochastic=True))
    steps = np.repeat(np.abs(np.asarray(x)).reshape(-1, BLOCK).max(-1) / (2 ** (bits - 1) - 1), BLOCK)
    assert (np.abs(values - np.asarray(x)) <= steps * 1.0001).all()
    assert (np.abs(values.mean(0) - np.asarray(x))[0] < 5 * 0.5 * steps / np.sqrt(len(keys))).all()
    nearest = arrived(Blockwise(bits=bits, block=BLOCK))
    assert (np.abs(nearest.mean(0) - np.asarray(x))[0] > 5 * 0.5 * steps / np.sqrt(len(keys))).any()


# ------------------------------------------------------------------------------------------------ on the host


def values(size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    found = rng.standard_normal(size) * 10.0 ** rng.integers(-20, 20, size)
    found[::5] = rng.integers(-3, 4, found[::5].size) / 2  # zeros, and what lies between two integers
    return found.astype(np.float32)


@every_row("name", CODECS)
def test_a_piece_has_the_values_of_the_compiled_codec(name: str) -> None:
    """Its bytes too, without the values that pad its last block: for whole blocks, the bytes that are claimed."""
    payload, (encode, decode), bits = Payload(codec=name, block=BLOCK), functions(name, "jax"), TABLE[name].bits
    for size in (1, 2, 31, 32, 33, 63, 1000, 1024):
        x, padding = values(size), -size % BLOCK
        x[-1] = np.finfo(np.float32).max  # in bf16 it would round to infinity
        whole = np.pad(x, (0, padding))
        sent, compiled = payload.encode(x), encode(whole)
        assert sent.nbytes == payload.bytes_per_value * whole.size - padding * bits // 8, size
        assert padding or sent == compiled.tobytes(), size
        received = memoryview(b"header!" + bytes(sent))[7:]  # at an address that is not a multiple of 4
        decoded = payload.decode(received, size)
        assert decoded.dtype == np.float32 and decoded.tobytes() == decode(compiled)[:size].tobytes(), size
        x[-1] = np.nan
        assert np.isnan(payload.decode(payload.encode(x), size)[-1]), size
        zeros = np.zeros(size, np.float32)
        assert payload.decode(payload.encode(zeros), size).tobytes() == zeros.tobytes(), size


def test_the_host_encodes_without_jax() -> None:
    code = (
        "import sys, numpy; sys.modules['jax'] = None; import elastic.replicas.payloads\n"
        "from compression.codecs import BODIES\n"
        "for make in BODIES.values(): make(8).decode(make(8).encode(numpy.ones(16, 'f4')))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


# ------------------------------------------------------------------------------------------- frozen weights


@every_row("base", BASES)
def test_blocks_keep_what_their_bits_can(base: str) -> None:
    """numpy and jax give the same codes, and values up to a rounding: XLA multiplies by 1 / 127.

    An error is at most half the distance of two codes.
    """
    half = {"int8": 0.5 / 127, "nf4": np.diff(NF4).max() / 2}[base]
    x = np.random.default_rng(0).normal(size=(3, 8, 128)).astype(np.float32)
    x[0, 0, :64] = 0
    stored = encode_matrices(x, base)
    assert sum(part.nbytes for part in stored.values()) == BASES[base].bytes_per_value(COLUMNS) * x.size
    back = decode_matrices(stored, x.dtype)
    largest = np.abs(x).reshape(3, 8, 2, 64).max(-1).repeat(64, -1)
    assert np.all(np.abs(back - x) <= largest * (half + 2**-8)) and not back[0, 0, :64].any()
    np.testing.assert_array_equal(decode_matrices(encode_matrices(back, base), x.dtype), back)
    by_jax = encode_matrices(jnp.asarray(x), base)
    jax.tree.map(np.testing.assert_array_equal, stored, jax.device_get(by_jax))
    np.testing.assert_allclose(back, decode_matrices(by_jax, x.dtype), rtol=2**-22)


def test_the_table_has_each_codec_once() -> None:
    assert [*BODIES] == [*TABLE]
