"""Models with the weights of transformers: its logits, and `config.json` in both directions.

tests/support/hugging_face_reference.py computed the logits with transformers; tests/test_hugging_face_library.py
computes them again.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.hugging_face_folders import changed, loaded, our_logits, section
from support.hugging_face_reference import FOLDER, LINEAR, MODELS, VOCAB, YARN, reference
from support.running import ROOT
from support.tables import check_rows, every_row, raised
from support.workload import whole

import models
from configs import command_line, hugging_face
from configs.schema import DecoderConfig, EncoderConfig
from models.block import exact_gelu, gated
from models.hugging_face import Weights
from models.hugging_face_export import write
from models.lora import in_blocks
from sharding.state import by_name
from training.optimizers import is_matrix


@every_row("name", MODELS)
def test_logits_and_loss_equal_transformers(name: str) -> None:
    """The loss is worked out from its logits, for random targets and weights."""
    theirs, rng = reference(name), np.random.default_rng(1)
    wanted, tokens = theirs["logits"].astype(np.float64), theirs["tokens"].astype(np.int32)
    targets, weights = rng.integers(0, VOCAB, tokens.shape), rng.uniform(0, 2, tokens.shape)
    batch: Any = {"tokens": tokens, "targets": targets.astype(np.int32), "weights": weights.astype(np.float32)}
    model, params = loaded(FOLDER / name, section(FOLDER / name))
    logits, loss = jax.jit(lambda p: (model.logits(p, tokens, whole), model.loss(p, batch, whole)))(params)
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(logits[..., :VOCAB], wanted, atol=1e-5)
    assert logits.shape[-1] > VOCAB and np.all(logits[..., VOCAB:] < -1e20)
    losses = np.log(np.exp(wanted).sum(-1)) - np.take_along_axis(wanted, targets[..., None], -1)[..., 0]
    assert (loss.shape, loss.dtype) == ((), np.float32)
    np.testing.assert_allclose(loss, np.sum(weights * losses), rtol=1e-5)


def test_tables_are_no_matrices_and_attention_alone_may_have_biases() -> None:
    """Positions, token types and experts' biases get neither weight decay nor Muon's orthogonalisation."""
    embed = models.build(section(FOLDER / "bert")).param_specs()["embed"]
    assert {"token", "position", "token_type"} < embed.keys()
    assert [name for name in ("token", "position", "token_type") if is_matrix(embed[name])] == ["token"]
    config = replace(section(FOLDER / "gpt_oss"), lora_rank=2, lora_base="int8")
    experts = models.build(config).plain_specs["layers"]["sparse"]["experts"]
    assert {name for name, spec in experts.items() if is_matrix(spec)} == {"up", "gate", "down"}
    assert {name for name, spec in experts.items() if in_blocks(config, spec)} == {"up", "gate", "down"}
    assert {name for name, spec in experts.items() if spec.is_vector} == {"up_bias", "gate_bias", "down_bias"}
    layers = models.build(DecoderConfig(attention_bias=True)).param_specs()["layers"]
    assert [name for name in layers if "bias" in layers[name]] == ["key", "out", "query", "value"]


@every_row("dtype", [np.float32, ml_dtypes.bfloat16])
def test_derivative_of_exact_gelu(dtype: Any) -> None:
    """Against differences of the definition, in float64."""
    x = np.linspace(-5, 5, 41).astype(dtype).astype(np.float64)
    value = np.vectorize(lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2)
    slope = jax.vmap(jax.grad(exact_gelu))(x.astype(dtype))
    assert slope.dtype == dtype
    tolerance = 1e-6 if dtype == np.float32 else 0.02
    np.testing.assert_allclose(
        np.asarray(slope, np.float64), (value(x + 1e-5) - value(x - 1e-5)) / 2e-5, atol=tolerance
    )


def test_the_clamped_activation_is_the_published_formula() -> None:
    """Within and beyond the limits of gate and up, which the small checkpoint does not reach."""
    gate, up = np.meshgrid(np.linspace(-20, 20, 41), np.linspace(-20, 20, 41))
    least, linear = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
    found = gated(jnp.float32(gate), jnp.float32(up), "swiglu_clamped")
    np.testing.assert_allclose(found, least / (1 + np.exp(-1.702 * least)) * linear, rtol=1e-5, atol=1e-6)


@every_row("dtype", [ml_dtypes.bfloat16, np.float64], isolated=True)
def test_other_float_dtypes_become_float32(dtype: Any, tmp_path: Path) -> None:
    folder = changed(FOLDER / "llama", tmp_path / "llama")
    rounded = {name: x.astype(dtype) for name, x in load_file(folder / "model.safetensors").items()}
    save_file(rounded, folder / "model.safetensors")
    _, params = loaded(folder, section(folder))
    up = params["layers"]["up"]["weight"]
    assert up.dtype == np.float32
    np.testing.assert_array_equal(up[1], rounded["model.layers.1.mlp.up_proj.weight"].astype(np.float32).T)


@every_row("name", ["llama", "gpt2", "bert"])
def test_new_token_ids_begin_as_the_mean_of_the_others(name: str) -> None:
    """Whole and in parts, as devices read them; the old ids have the same logits, and padding is zero."""
    config, theirs = replace(section(FOLDER / name), vocab_size=270), reference(name)
    weights = Weights(models.build(config), FOLDER / name)
    table = weights.whole("embed/token")
    np.testing.assert_allclose(table[VOCAB:270], np.tile(table[:VOCAB].mean(0), (10, 1)), atol=1e-6)
    assert table.shape == (384, 16) and not table[270:].any()
    np.testing.assert_array_equal(weights.region("embed/token", (slice(255, 300), slice(8, 16))), table[255:300, 8:])
    np.testing.assert_allclose(our_logits(FOLDER / name, theirs["tokens"], config), theirs["logits"], atol=1e-5)
    if name == "llama":
        head = weights.region("head/weight", (slice(4, 8), slice(192, 384)))
        means = weights.whole("head/weight")[4:8, :VOCAB].mean(1)
        np.testing.assert_allclose(head[:, 68:78], np.tile(means, (10, 1)).T, rtol=1e-5)


def test_weights_of_older_names_and_other_heads_are_read(tmp_path: Path) -> None:
    """BERT's first checkpoints: norms as TensorFlow names them, the bare model without a prefix, other tasks' heads."""
    folder = changed(FOLDER / "bert", tmp_path / "bert")
    path = folder / "model.safetensors"
    old = {}
    for name, x in load_file(path).items():
        old_name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        old[old_name.removeprefix("bert.")] = x
    old |= {"bert.pooler.dense.weight": np.zeros((16, 16), np.float32), "embeddings.position_ids": np.arange(40)}
    copy = {"cls.predictions.decoder.bias": old["cls.predictions.bias"].copy()}
    old |= {"cls.seq_relationship.bias": np.zeros(2, np.float32), **copy}
    save_file(old, path)
    theirs = reference("bert")
    np.testing.assert_allclose(our_logits(folder, theirs["tokens"]), theirs["logits"], atol=1e-5)


@every_row("name", MODELS)
def test_config_json_goes_both_ways(name: str) -> None:
    theirs = json.loads((FOLDER / name / "config.json").read_text())
    config = section(FOLDER / name)
    architecture = hugging_face.architecture_of(config)
    ours = hugging_face.config_json(config, architecture)
    assert (ours["model_type"], ours["architectures"]) == (theirs["model_type"], theirs["architectures"])
    left_out = {"bos_token_id", "eos_token_id", "n_inner"} | (set() if name == "roberta" else {"pad_token_id"})
    for key in ours.keys() & theirs.keys() - left_out:
        assert ours[key] == theirs[key], key
    assert config.weights == str(FOLDER / name)


ONE_BASE: dict[str, Any] = {"rotary_scaling": "none", "rotary_local_base": 0.0}  # of layers with a window and others
NO_WINDOW = {"layer_types": ["full_attention"] * 3, "sliding_window": 4096}  # which none has
MIXED = ["sliding_attention", "full_attention"]
LOCAL = {"rope_local_base_freq": 50.0, "layer_types": ["sliding_attention"] * 3}


@every_row(
    ("name", "changes", "told"),
    [
        ("gemma3", ONE_BASE, {"rope_local_base_freq": 500.0, "sliding_window": 4}),
        ("gemma3", {"global_every": 6}, LOCAL),
        ("gemma3", {"global_every": 0, **ONE_BASE, "rotary_base": 50.0}, LOCAL),
        ("gemma3", {"window": 0, "global_every": 0, "rotary_local_base": 0.0}, NO_WINDOW),
        ("llama", {"rotary_factor": 8.0, "rotary_low": 2.0}, {"rope_scaling": None}),
    ],
    isolated=True,
)
def test_what_is_written_is_the_same_model(
    name: str, changes: dict[str, Any], told: dict[str, Any], tmp_path: Path
) -> None:
    model = models.build(replace(section(FOLDER / name), weights="", **changes))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda spec: rng.normal(0, 0.2, spec.shape).astype(np.float32), model.param_specs())
    values, tokens = by_name(params), reference(name)["tokens"].astype(np.int32)
    write(model, tmp_path, values.__getitem__)
    found = json.loads((tmp_path / "config.json").read_text())
    assert {key: found[key] for key in told} == told
    assert isinstance(model, models.Decoder)
    wanted = jax.jit(lambda p: model.logits(p, tokens, lambda _, tree: tree))(params)[..., :VOCAB]
    np.testing.assert_allclose(our_logits(tmp_path, tokens), wanted, atol=1e-6)


def test_models_without_a_counterpart_are_one_line(tmp_path: Path) -> None:
    """One base that is scaled, windows of no size, another kind of model, and models of no architecture."""
    one_base = replace(section(FOLDER / "gemma3"), weights="", rotary_local_base=0.0)
    file = changed(FOLDER / "gemma3", tmp_path / "gemma3") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sliding_window": None}))
    counterpart = lambda config: lambda: hugging_face.architecture_of(config)
    encoder = models.build(EncoderConfig())
    rows: list[tuple[Callable[[], object], str]] = [
        (counterpart(one_base), "Gemma3ForCausalLM needs model.rotary_local_base=500.0"),
        (lambda: hugging_face.read(file.parent), "config.json has no sliding_window"),
        (lambda: Weights(encoder, FOLDER / "gpt2"), "model.kind='encoder', but 'decoder' there"),
        (counterpart(DecoderConfig(norm="layer")), "LlamaForCausalLM needs model.norm='rms'"),
        (counterpart(EncoderConfig()), "BertForMaskedLM needs model.norm_first=False, model.token_types=1"),
        (counterpart(EncoderConfig(norm_first=False, position_offset=2)), "model.token_types=1"),
    ]
    check_rows(rows, lambda action, message: raised(action).index(message))


def test_the_config_file_on_the_page_takes_the_sizes_of_a_checkpoint(tmp_path: Path) -> None:
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "hugging_face.md").read_text(), re.DOTALL)
    (code,) = (text for text in shown if "def get_config" in text)
    (tmp_path / "fine_tune.py").write_text(code)
    argv = ["train.py", f"--config={tmp_path / 'fine_tune.py'}:{FOLDER / 'llama'}", "--config.data.seq_len=8"]
    config = command_line.parse(argv)
    assert config.model == section(FOLDER / "llama")
    assert config.data.tokenizer_path == str(FOLDER / "llama" / "tokenizer.json")


def test_config_json_of_older_versions(tmp_path: Path) -> None:
    """Llama's before transformers 5: no rope_parameters, no bias keys, no head_dim."""
    absent = dict.fromkeys(("rope_parameters", "attention_bias", "mlp_bias", "head_dim", "tie_word_embeddings"))
    config = section(changed(FOLDER / "llama", tmp_path / "a", **absent, rope_theta=500.0, rope_scaling=None))
    assert config == replace(section(FOLDER / "llama"), weights=config.weights)


def test_null_positions_of_gpt_oss_are_its_default(tmp_path: Path) -> None:
    """YaRN that rounds nothing, as in transformers; a null `truncate` rounds nothing either."""
    folder = changed(FOLDER / "gpt_oss", tmp_path / "a")
    values = json.loads((folder / "config.json").read_text()) | {"rope_parameters": None}
    (folder / "config.json").write_text(json.dumps(values))
    found = section(folder)
    assert isinstance(found, DecoderConfig)
    assert (found.rotary_scaling, found.rotary_base, found.rotary_factor) == ("yarn", 150_000, 32)
    assert not found.rotary_truncate
    found = section(changed(FOLDER / "yarn", tmp_path / "b", rope_parameters=YARN | {"truncate": None}))
    assert isinstance(found, DecoderConfig) and not found.rotary_truncate


def test_defaults_of_yarn(tmp_path: Path) -> None:
    """As in transformers: 32 turns, 1 turn, and the attention factor of the paper or of two scales (DeepSeek)."""
    rope = {key: x for key, x in YARN.items() if key not in ("beta_fast", "beta_slow", "attention_factor")}
    found = section(changed(FOLDER / "yarn", tmp_path / "a", rope_parameters=rope))
    assert isinstance(found, DecoderConfig)
    assert (found.rotary_low, found.rotary_high) == (1, 32)
    assert found.rotary_attention == pytest.approx(1.1386, abs=1e-4)
    scales = rope | {"mscale": 2.0, "mscale_all_dim": 1.0}
    found = section(changed(FOLDER / "yarn", tmp_path / "b", rope_parameters=scales))
    assert isinstance(found, DecoderConfig)
    assert found.rotary_attention == pytest.approx(1.2773 / 1.1386, abs=1e-4)


@every_row(
    ("name", "changes", "message"),
    [
        (
            "llama",
            {"model_type": "mamba"},
            "'mamba' is not supported; one of gpt2, .*, mixtral, .*, gpt_oss is",
        ),
        (
            "llama",
            {"model_type": "deepseek_v3"},
            "'deepseek_v3' is not supported, because latent attention .* are missing",
        ),
        ("qwen2_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported; \[\] is"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported; None is"),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu' is not supported; 'silu' is"),
        ("llama", {"head_dim": 8}, "model.head_dim=0, but 8 there"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic' are not supported; default, .* and yarn"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "config.json has no factor"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported; 7.0 is"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "model.rotary_factor=0.0 must be above 0"),
        ("llama", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported; 1"),
        ("mistral", {"sliding_window": "4"}, "model.window='4' must be a whole number"),
        ("mistral", {"layer_types": MIXED}, "layer_types is not supported with another sliding_window: all"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True is not supported; False is"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is not supported in which"),
        ("gemma2", {"layer_types": 3}, "layer_types is 3, not a list of full_attention and sliding_attention"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0, not a number"),
        ("gemma3", {"rope_parameters": {"sliding_attention": LINEAR}}, "sliding_attention of rope_type 'linear' is"),
        ("llama", {"mlp_bias": True}, "mlp_bias without attention_bias is not supported"),
        ("llama", {"hidden_size": None}, "config.json has no hidden_size"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0, not an integer from 1 on"),
        ("llama", {"rope_scaling": ["x"], "rope_parameters": None}, r"rope_scaling is \['x'\], not an object"),
        ("llama", {"rms_norm_eps": 1e-5}, "model.norm_eps=1e-06, but 1e-05 there"),
        ("gpt2", {"n_layer": 3, "n_head": 2}, "model.num_layers=2, but 3 there, model.num_heads=4, but 2 there"),
        ("gpt2", {"activation_function": "relu"}, "an activation 'relu' is not supported; one of gelu_new, gelu, "),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        ("roberta", {"pad_token_id": 0}, "model.max_len=40, but 41 there, model.position_offset=2, but 1 there"),
    ],
    isolated=True,
)
def test_bad_config_json_is_one_line(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = changed(FOLDER / name, tmp_path / name, **changes)
    with pytest.raises(ValueError, match=message) as error:
        Weights(models.build(section(FOLDER / name)), folder)
    assert str(folder / "config.json") in str(error.value) and "\n" not in str(error.value)
