"""What travels between replicas has the bits of the codecs that run inside compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compression import codecs
from replicas.payloads import BFloat16, Int8, Payload, make_payload

BLOCK = 16
LARGEST = float(np.finfo(np.float32).max)
SIZES = [1, 2, 15, 16, 17, 31, 64, 1000]
PAYLOADS = [make_payload(name, BLOCK) for name in ("none", "bf16", "int8")]


def values(size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    found = rng.standard_normal(size) * 10.0 ** rng.integers(-20, 20, size)
    found[::5] = rng.integers(-3, 4, found[::5].size) / 2  # zeros, and what lies between two integers
    return found.astype(np.float32)


def by_codec(codec: codecs.BFloat16 | codecs.Blockwise, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the payload of `x` `[N]`, filled up with zeros to whole rows, and its first N values."""
    padded = np.zeros(-(-x.size // codec.multiple) * codec.multiple, np.float32)
    padded[: x.size] = x
    payload = jax.jit(codec.encode)(jnp.array(padded), jax.random.key(0))
    return np.asarray(payload), np.asarray(jax.jit(codec.decode)(payload))[: x.size]


@pytest.mark.parametrize("size", SIZES)
def test_bf16_has_the_bits_of_the_codec(size: int) -> None:
    x = values(size)
    x[-1] = LARGEST  # would round to infinity
    payload = BFloat16().encode(x)
    expected, decoded = by_codec(codecs.BFloat16(), x)
    assert payload == expected.tobytes()
    assert BFloat16().decode(payload).tobytes() == decoded.tobytes() and np.isfinite(decoded).all()


@pytest.mark.parametrize("size", SIZES)
def test_int8_has_the_bits_of_the_codec(size: int) -> None:
    x = values(size)
    payload = Int8(block=BLOCK).encode(x)
    expected, decoded = by_codec(codecs.Blockwise(bits=8, block=BLOCK), x)
    padding = -size % BLOCK
    assert payload == expected[:size].tobytes() + expected[size + padding :].tobytes()
    assert Int8(block=BLOCK).decode(payload).tobytes() == decoded.tobytes()
    block_of = np.arange(size) // BLOCK
    largest = np.array([np.abs(x[block_of == block]).max() for block in block_of])
    assert (np.abs(decoded - x) <= largest / 127 * 0.5001).all()


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("size", SIZES)
def test_a_payload_has_the_bytes_that_it_claims(payload: Payload, size: int) -> None:
    """Exactly for whole blocks; else one scale for the last one, as for the others."""
    sent = payload.encode(values(size))
    whole = -(-size // BLOCK) * BLOCK
    assert len(payload.encode(values(whole))) == payload.bytes_per_value * whole
    assert len(sent) == payload.bytes_per_value * whole - (whole - size) * int(payload.bytes_per_value)
    assert payload.decode(memoryview(sent)).tobytes() == payload.decode(sent).tobytes()
    assert payload.decode(sent).size == size and payload.decode(sent).dtype == np.float32


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(payload: Payload, bad: float) -> None:
    """Or a step that diverged would go on as if it had not. A quantised block becomes NaN whole, as in the codec."""
    x = values(3 * BLOCK + 3)
    x[[BLOCK + 1, -1]] = bad
    got = payload.decode(payload.encode(x))
    assert not np.isfinite(got[[BLOCK + 1, -1]]).any()
    assert np.isfinite(got[:BLOCK]).all() and np.isfinite(got[2 * BLOCK : 3 * BLOCK]).all()
    if isinstance(payload, Int8):
        np.testing.assert_array_equal(got, by_codec(codecs.Blockwise(bits=8, block=BLOCK), x)[1])
    elif isinstance(payload, BFloat16):
        np.testing.assert_array_equal(got, by_codec(codecs.BFloat16(), x)[1])


def test_zeros_stay_zeros() -> None:
    x = np.zeros(BLOCK + 1, np.float32)
    for payload in PAYLOADS:
        assert payload.decode(payload.encode(x)).tobytes() == x.tobytes()


def test_none_is_as_it_is() -> None:
    x = values(100)
    assert make_payload("none", BLOCK).encode(x) == x.tobytes()
