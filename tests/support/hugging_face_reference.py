"""Small checkpoints written by transformers, with the values that transformers computes from them, for the tests.

    python tests/support/hugging_face_reference.py [NAME ...]

writes tests/data/hugging_face again, with requirements/hugging-face.txt. The quick tests read the files;
tests/test_hugging_face_library.py compares them with the installed transformers.
"""

import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))
os.environ["HF_HUB_OFFLINE"] = "1"

from configs.schema import DataConfig
from input_pipeline import load

FOLDER = Path(__file__).parents[1] / "data" / "hugging_face"
VOCAB, HIDDEN, LAYERS, HEADS, MAX_LEN = 260, 16, 2, 4, 40
ROWS, SEQ_LEN = 16, 32  # shape of a training batch
NO_IDS = {"bos_token_id": None, "eos_token_id": None}
SIZES = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
LLAMA = NO_IDS | SIZES | dict(intermediate_size=24, num_key_value_heads=2, max_position_embeddings=MAX_LEN)
OF_LLAMA = LLAMA | dict(pad_token_id=None)
PLAIN = dict(rope_type="default", rope_theta=500.0)
LINEAR = dict(rope_type="linear", rope_theta=500.0, factor=2.0)
LLAMA_3 = dict(rope_type="llama3", rope_theta=500.0, factor=4.0, original_max_position_embeddings=32)
LLAMA_3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=10)
YARN |= dict(beta_fast=2.0, beta_slow=0.5, attention_factor=0.1 * math.log(4) + 1)
GEMMA = OF_LLAMA | dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=12)
GEMMA_2 = dict(use_bidirectional_attention=False, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
GEMMA_3 = dict(num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
GEMMA_3 |= dict(rope_parameters=dict(full_attention=LINEAR, sliding_attention=PLAIN | dict(rope_theta=50.0)))
EXPERTS = OF_LLAMA | dict(num_experts_per_tok=2)
QWEN_EXPERTS = EXPERTS | dict(num_experts=5, moe_intermediate_size=12, norm_topk_prob=True, head_dim=8)
GPT_OSS = EXPERTS | dict(num_local_experts=4, num_hidden_layers=3, head_dim=8, sliding_window=5)
GPT_OSS |= dict(rope_parameters=YARN | dict(truncate=False, beta_fast=4.0, original_max_position_embeddings=32))
SHARED = QWEN_EXPERTS | dict(num_experts=4, norm_topk_prob=False, shared_expert_intermediate_size=20)
SHARED.pop("head_dim")
GPT_2 = dict(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=MAX_LEN)
BERT = SIZES | dict(intermediate_size=32, max_position_embeddings=MAX_LEN)
# name: the class, and its config
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", NO_IDS | GPT_2),
    "llama": ("LlamaForCausalLM", LLAMA | dict(rope_parameters=PLAIN)),
    "llama3": ("LlamaForCausalLM", OF_LLAMA | dict(head_dim=8, rope_parameters=LLAMA_3)),
    "yarn": ("Qwen3ForCausalLM", OF_LLAMA | dict(head_dim=16, rope_parameters=YARN)),
    "mistral": ("MistralForCausalLM", OF_LLAMA | dict(sliding_window=5, rope_parameters=LINEAR)),
    "qwen2": ("Qwen2ForCausalLM", OF_LLAMA | dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3ForCausalLM", OF_LLAMA | dict(head_dim=8)),
    "mixtral": ("MixtralForCausalLM", EXPERTS | dict(num_local_experts=4, sliding_window=5, head_dim=8)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", QWEN_EXPERTS | dict(num_experts_per_tok=3)),
    "qwen2_moe": ("Qwen2MoeForCausalLM", SHARED),
    "olmoe": ("OlmoeForCausalLM", EXPERTS | dict(num_experts=5, intermediate_size=12)),
    "gpt_oss": ("GptOssForCausalLM", GPT_OSS),
    "gemma2": ("Gemma2ForCausalLM", GEMMA | GEMMA_2),
    "gemma3": ("Gemma3ForCausalLM", GEMMA | GEMMA_3),
    "bert": ("BertForMaskedLM", BERT),
    "roberta": ("RobertaForMaskedLM", BERT | dict(max_position_embeddings=MAX_LEN + 2, type_vocab_size=1)),
}


def make(name: str, **changes: Any) -> Any:
    """Returns a model of transformers with random values around the initial scales of norms, for inference.

    Gemma's scales begin at zero. Around one they double a norm's output: float32's rounding error is then 1e-5.
    """
    import torch
    import transformers

    kind = getattr(transformers, MODELS[name][0])
    config = kind.config_class(**MODELS[name][1] | changes, attn_implementation="eager")  # others ignore soft caps
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            is_scale = parameter.ndim == 1 and path.endswith("weight") and "gemma" not in name
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + is_scale)
    return model.eval()


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Returns transformers' logits, float32 `[B, T, V]`."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.float().numpy()


def batch(name: str, step: int = 0) -> dict[str, np.ndarray]:
    """Returns the rows of a step of a run on synthetic data with seed 0."""
    objective = "masked" if "bert" in name else "causal"
    data = load(DataConfig(source="synthetic", seq_len=SEQ_LEN, objective=objective), "train", 0)
    rows = [data[step * ROWS + i] for i in range(ROWS)]
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def batch_loss(model: Any, name: str) -> float:
    """Returns transformers' own loss of the first batch: the mean over the tokens to predict, in nats."""
    import torch

    with torch.no_grad():
        return float(loss_of(model, name, 0))


def loss_of(model: Any, name: str, step: int) -> Any:
    """Returns transformers' own loss of the batch of a step, a tensor of torch."""
    import torch

    rows = batch(name, step)
    labels = np.where(rows["weights"] > 0, rows["targets"], -100).astype(np.int64)
    tokens = torch.from_numpy(rows["tokens"].astype(np.int64))
    # labels of a causal model are shifted by transformers, ours are already
    shifted = {} if "bert" in name else {"shift_labels": torch.from_numpy(labels)}
    return model(tokens, labels=torch.from_numpy(labels), **shifted).loss


def reference(name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of transformers: `tokens` and `logits` of an example, `batch_loss` of the first batch."""
    with np.load(FOLDER / name / "reference.npz") as file:
        return dict(file)


def example(name: str) -> np.ndarray:
    """Returns tokens `[2, 12]`; RoBERTa's position ids would skip the padding id, 1."""
    del name
    return np.random.default_rng(0).integers(2, VOCAB, (2, 12))


def main() -> None:
    """Writes the files of the named models, or of all."""
    for name in sys.argv[1:] or MODELS:
        model, folder = make(name), FOLDER / name
        model.save_pretrained(folder, max_shard_size="20KB" if name == "gpt2" else "5GB")
        tokens = example(name)
        np.savez(
            folder / "reference.npz", tokens=tokens, logits=logits(model, tokens), batch_loss=batch_loss(model, name)
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
