"""Small transformers, and their layers in numpy."""

from typing import Any

import numpy as np

import models
from configs.schema import MODELS
from models.model import Params

GPT2 = {"positions": "learned", "norm": "layer", "activation": "gelu", "use_bias": True, "tied_head": True}
LLAMA = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "use_bias": False, "tied_head": True}


STYLES = {
    "gpt2": GPT2,
    "llama_grouped": LLAMA | {"num_kv_heads": 2},
    "llama_untied": LLAMA | {"num_kv_heads": 1, "tied_head": False},
    "llama_attention_bias": LLAMA | {"attention_bias": True},
    "mixed": LLAMA | {"norm": "layer", "use_bias": True},
}


def small(kind: str, **changes: Any) -> models.Model:
    section = dict(num_layers=2, hidden=16, intermediate=40, num_heads=4, vocab_size=11, vocab_multiple=8, max_len=9)
    return models.build(MODELS[kind](**section | changes))


def norm(x: np.ndarray, p: Params, kind: str) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p.get("bias", 0)


def linear(x: np.ndarray, p: Params) -> np.ndarray:
    return x @ p["weight"] + p.get("bias", 0)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def turn(x: np.ndarray) -> np.ndarray:
    """Rotary positions of one head `[T, H]`: pairs as complex numbers, multiplied by `e^(i t w)`."""
    half = x.shape[1] // 2
    turns = np.exp(1j * np.outer(np.arange(len(x)), 10_000.0 ** (-np.arange(half) / half)))
    z = (x[:, :half] + 1j * x[:, half:]) * turns
    return np.concatenate([z.real, z.imag], axis=1)


def layer(x: np.ndarray, p: Params, num_heads: int, kv_heads: int, kind: str, rotary: bool, causal: bool) -> np.ndarray:
    y, size, heads = norm(x, p["attention_norm"], kind), x.shape[1] // num_heads, []
    for head in range(num_heads):
        shared = head // (num_heads // kv_heads)
        q = linear(y, p["query"])[:, head * size : (head + 1) * size]
        k, v = (linear(y, p[name])[:, shared * size : (shared + 1) * size] for name in ("key", "value"))
        scores = (turn(q) @ turn(k).T if rotary else q @ k.T) / np.sqrt(size)
        scores = np.where(np.tri(len(x), dtype=bool) | (not causal), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v)
    x = x + linear(np.concatenate(heads, axis=1), p["out"])
    y = norm(x, p["mlp_norm"], kind)
    up = linear(y, p["up"])
    gate = linear(y, p["gate"]) if "gate" in p else None
    return x + linear(gelu(up) if gate is None else gate / (1 + np.exp(-gate)) * up, p["down"])
