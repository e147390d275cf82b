"""What travels between replicas has the bits of the codecs that run inside compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compression import codecs
from configs.schema.sections import CODECS
from elastic.replicas.payloads import PAYLOADS, BFloat16, Blockwise, Payload, make_payload

BLOCK = 16
LARGEST = float(np.finfo(np.float32).max)
SIZES = [1, 15, 17, 64]
FORMS = [make_payload(name, BLOCK) for name in PAYLOADS]


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
def test_a_payload_has_the_bits_of_the_codec(size: int) -> None:
    """Payloads too, but for the values that pad the last block of integers, which do not travel."""
    x = values(size)
    for bits in (8, 4):
        form = Blockwise(bits=bits, block=BLOCK)
        payload = form.encode(x)
        expected, decoded = by_codec(codecs.Blockwise(bits=bits, block=BLOCK), x)
        assert form.decode(payload, size).tobytes() == decoded.tobytes(), bits
        assert size % BLOCK or payload == expected.tobytes(), bits
        block_of = np.arange(size) // BLOCK
        largest = np.array([np.abs(x[block_of == block]).max() for block in block_of])
        assert (np.abs(decoded - x) <= largest / (2 ** (bits - 1) - 1) * 0.5001).all(), bits
    x[-1] = LARGEST  # would round to infinity
    payload = BFloat16().encode(x)
    expected, decoded = by_codec(codecs.BFloat16(), x)
    assert payload == expected.tobytes()
    assert BFloat16().decode(payload, size).tobytes() == decoded.tobytes() and np.isfinite(decoded).all()


@pytest.mark.parametrize(("payload", "bits"), [*zip(FORMS, (32, 16, 8, 4), strict=True)])
def test_a_payload_has_the_bytes_that_it_claims(payload: Payload, bits: int) -> None:
    """Exactly for whole blocks; else one scale for the last one, as for the others, and whole bytes."""
    for size in (1, 2, 15, 16, 17, 31, 64, 1000):
        sent = payload.encode(values(size))
        whole = -(-size // BLOCK) * BLOCK
        assert len(payload.encode(values(whole))) == payload.bytes_per_value * whole, size
        assert len(sent) == payload.bytes_per_value * whole - (whole - size) * bits // 8, size
        decoded = payload.decode(memoryview(bytes(sent)), size)
        assert decoded.size == size and decoded.dtype == np.float32


@pytest.mark.parametrize("payload", FORMS)
def test_values_that_are_not_finite_stay_so(payload: Payload) -> None:
    """Or a step that diverged would go on as if it had not. A quantised block becomes NaN whole, as in the codec."""
    for bad in (np.inf, -np.inf, np.nan):
        x = values(3 * BLOCK + 3)
        x[[BLOCK + 1, -1]] = bad
        got = payload.decode(payload.encode(x), x.size)
        assert not np.isfinite(got[[BLOCK + 1, -1]]).any()
        assert np.isfinite(got[:BLOCK]).all() and np.isfinite(got[2 * BLOCK : 3 * BLOCK]).all()
        if isinstance(payload, Blockwise):
            np.testing.assert_array_equal(got, by_codec(codecs.Blockwise(bits=payload.bits, block=BLOCK), x)[1])
        elif isinstance(payload, BFloat16):
            np.testing.assert_array_equal(got, by_codec(codecs.BFloat16(), x)[1])


def test_zeros_stay_zeros() -> None:
    x = np.zeros(BLOCK + 1, np.float32)
    for payload in FORMS:
        assert payload.decode(payload.encode(x), x.size).tobytes() == x.tobytes()


def test_every_codec_that_needs_no_residual_travels_between_replicas() -> None:
    assert [*PAYLOADS] == [*CODECS]
    x = values(100)
    assert make_payload("none", BLOCK).encode(x) == x.tobytes()
