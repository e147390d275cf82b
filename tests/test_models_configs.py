"""The config files: published sizes, and what a bad model section is told."""

import importlib
import math
from pathlib import Path
from typing import Any

import jax
import pytest
from support.tables import every_row

import models
from configs import base, tiny
from configs.base import typed
from configs.schema import Config, DecoderConfig, EncoderConfig
from sharding.scopes import make_layout
from sharding.spec import ParamSpec, place_all

FILES = Path(base.__file__).parent.glob("*.py")
NAMES = sorted(path.stem for path in FILES if path.read_text().count("\ndef get_config("))
NAMES += [*(f"tiny:{name}" for name in tiny.MODELS), "digits:vit", "resnet50:lars"]
DIMS = {"layers", "embed", "mlp", "heads", "kv_heads", "vocab", "position", "norm", "experts", "router"}
DIMS |= {"adapter_in", "rank", "adapter_out", "head"}
# MiCS (Zhang et al. 2022), table 1 and figure 16: hidden, intermediate, layers, vocabulary, group, name's size.
TABLE_1 = {
    "bert_10b": (2560, 10240, 127, 32008, 8, 10e9),
    "bert_15b": (2560, 10240, 190, 32008, 16, 15e9),
    "bert_20b": (5120, 20480, 64, 32008, 16, 20e9),
    "bert_50b": (8192, 32768, 62, 32008, 64, 50e9),
    "roberta_20b": (5120, 20480, 62, 50265, 16, 20e9),
    "gpt2_20b": (5120, 20480, 62, 50265, 16, 20e9),
    "bert_1_5b": (1600, 6400, 48, 32008, 8, 1.5e9),
}
# parameters of the published checkpoints
OPEN_MODELS = {
    "llama:8b": 8_030_261_248,
    "llama:70b": 70_553_706_496,
    "decoder:7b": 6_738_415_616,
    "decoder:13b": 13_015_864_320,
    "decoder:70b": 70_553_706_496,
    "decoder:405b": 405_853_388_800,
    "qwen:7b": 7_615_616_512,
    "qwen:8b": 8_190_735_360,
    "qwen:30b_a3b": 30_532_122_624,
    "qwen:235b_a22b": 235_093_634_560,
    "mistral:8x7b": 46_702_792_704,
    "mistral:7b": 7_248_023_552,
    "mistral:7b_v0.1": 7_241_732_096,
    "gpt_oss:20b": 20_914_757_184,
    "gpt_oss:120b": 116_829_156_672,
    "gemma:2b": 2_614_341_888,
    "gemma:9b": 9_241_705_984,
    "gemma:27b": 27_227_128_320,
}


def load(name: str) -> Any:
    file, _, argument = name.partition(":")
    return importlib.import_module(f"configs.{file}").get_config(*[argument] * bool(argument))


@every_row("name", NAMES)
def test_every_config_builds_its_model(name: str) -> None:
    section = load(name)
    if name == "base":
        section.sharding.partition_size = 2  # which each experiment chooses
    config = typed(section)
    model = models.build(config.model)
    specs = model.param_specs()
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    if config.model.kind == "resnet":
        assert {"stem", "stage1_block0", "head"} <= set(specs) and config.data.objective == "classify"
        assert config.data.channels == config.model.channels
        return
    if config.model.kind == "vit":
        assert list(specs) == ["embed", "layers", "head"] and config.data.image_size == config.model.image_size
        return
    assert list(specs) == ["embed", "layers", "head"]
    assert all(isinstance(spec, ParamSpec) and set(spec.dims) <= DIMS for spec in leaves)
    for spec in jax.tree.leaves(specs["layers"], is_leaf=lambda x: isinstance(x, ParamSpec)):
        stacked = getattr(config.model, "num_moe_layers", config.model.num_layers)
        assert spec.dims[0] == "layers" and spec.shape[0] == stacked
    assert config.data.seq_len <= config.model.max_len
    assert (config.data.objective == "masked") == (config.model.kind == "encoder")


@every_row("name", TABLE_1)
def test_paper_configs_have_the_published_sizes(name: str) -> None:
    hidden, intermediate, layers, vocab, group, size = TABLE_1[name]
    config = typed(load(f"mics_paper:{name}"))
    c, model = config.model, models.build(config.model)
    assert (c.hidden, c.intermediate, c.num_layers, c.vocab_size) == (hidden, intermediate, layers, vocab)
    assert (config.sharding.strategy, config.sharding.partition_size) == ("mics", group)
    assert (config.data.seq_len, config.batch.micro_size, c.remat) == (512, 8, "full")
    assert config.batch.global_size == (512 if name == "bert_1_5b" else 8192)
    assert math.isclose(model.num_params, 12 * layers * hidden**2 + vocab * hidden, rel_tol=4e-3)
    extra = (
        13 * layers * hidden + (-vocab % 128) * hidden + 512 * hidden + 2 * hidden
    )  # biases, norms, padding, positions
    if c.kind == "encoder":
        extra += hidden**2 + 3 * hidden + vocab + (-vocab % 128)  # the head: dense layer, norm, output bias
    assert model.num_params == 12 * layers * hidden**2 + vocab * hidden + extra
    assert math.isclose(model.num_params, size, rel_tol=0.03)
    # The paper's 96 T l L h^2 (1 + l/6h + V/16Lh) per token, less the recomputed forward pass of the layers.
    flops = 96 * layers * hidden**2 * (1 + 512 / (6 * hidden) + vocab / (16 * layers * hidden))
    flops -= 24 * layers * hidden**2 * (1 + 512 / (6 * hidden))
    assert math.isclose(model.flops_per_token(512), flops, rel_tol=4e-3)


@every_row(("name", "num_params"), OPEN_MODELS.items())
def test_open_models_have_the_published_parameters(name: str, num_params: int) -> None:
    config = typed(load(name))
    model = models.build(config.model)
    assert model.num_params == num_params
    layout = make_layout(config.sharding, num_nodes=4, devices_per_node=8)
    place_all(model.param_specs(), layout)  # no parameter is refused


@every_row("name", ["600b", "37b", "12.5b"])
def test_gshard_has_the_published_sizes(name: str) -> None:
    """Table 1 of arXiv 2006.16668 gives rounded sizes; the experts of every other layer are nearly all of them."""
    config = typed(load(f"gshard:{name}"))
    model = models.build(config.model)
    assert math.isclose(model.num_params, float(name[:-1]) * 1e9, rel_tol=0.06)
    experts, layers = config.model.num_experts, config.model.num_layers
    in_experts = layers // 2 * experts * 2 * 1024 * 8192
    in_layers = layers * 4 * 1024**2 + layers // 2 * (2 * 1024 * 8192 + 1024 * experts) + 2 * layers * 1024
    assert model.num_params == in_experts + in_layers + 64000 * 1024 + 1024
    assert config.model.capacity(1024) == max(1, 2 * 1024 // experts)  # the paper's 2N/(G E)
    nodes = min(experts, 1024) // 8
    layout = make_layout(config.sharding, num_nodes=nodes, devices_per_node=8)
    place_all(model.param_specs(), layout)  # no parameter is refused


def test_flops_exclude_lookup_parameters() -> None:
    tied, untied, learned = (
        models.Decoder(DecoderConfig(**changes))
        for changes in ({}, {"tied_head": False}, {"tied_head": False, "positions": "learned"})
    )
    assert untied.num_params == tied.num_params + 256 * 128 and learned.num_params == untied.num_params + 256 * 128
    assert tied.flops_per_token(256) == untied.flops_per_token(256) == learned.flops_per_token(256)
    assert tied.flops_per_token(100) == 6 * tied.num_params + 12 * 4 * 128 * 100
    wide = models.Decoder(DecoderConfig(head_dim=64, window=30, global_every=3))
    assert wide.flops_per_token(100) == 6 * wide.num_params + 12 * 4 * 64 * (100 + 3 * 30)
    assert wide.flops_per_token(20) == 6 * wide.num_params + 12 * 4 * 64 * 4 * 20


@every_row(
    ("name", "changes", "words"),
    [
        ("quickstart", {"model.num_heads": 5}, ["model.num_heads", "5", "128", "nearest divisor is 4"]),
        ("quickstart", {"model.num_kv_heads": 3}, ["model.num_kv_heads", "3", "model.num_heads = 4"]),
        ("quickstart", {"model.num_heads": 128, "model.num_kv_heads": 128}, ["model.num_heads", "128", "even"]),
        ("quickstart", {"model.attention": "cudnn"}, ["model.attention", "'cudnn'", "float16", "xla"]),
        ("gemma", {"model.attention": "cudnn", "data.packing": "stream"}, ["'cudnn'", "windows, capped", "pallas"]),
        ("gemma", {"model.window": 0}, ["model.global_every = 2", "set model.window"]),
        ("gemma", {"model.global_every": 0, "model.rotary_local_base": 5.0}, ["rotary_local_base = 5.0", "every"]),
        ("llama", {"model.rotary_high": 1.0}, ["model.rotary_high = 1.0", "model.rotary_low = 1.0"]),
        ("llama", {"model.num_heads": 24}, ["model.num_heads = 24", "nearest divisor is 16"]),
        ("tiny:moe", {"model.window": 4, "model.global_every": 2}, ["model.global_every = 2", "experts"]),
        ("tiny:moe", {"model.num_experts": 1}, ["model.experts_per_token = 2", "model.num_experts = 1"]),
        ("tiny:moe", {"model.num_layers": 3}, ["model.moe_every = 2", "model.num_layers = 3"]),
        ("digits", {"model.stage_blocks": ()}, ["model.stage_blocks", "at least one stage"]),
        ("digits", {"model.norm_groups": 5}, ["model.norm_groups", "5", "model.width = 16"]),
        ("digits", {"model.widening": 10}, ["model.widening = 10: only bottlenecks", "set model.block="]),
        ("digits", {"model.hidden": 3}, ["model.hidden is not a key of model.kind=resnet, but of decoder"]),
        ("digits:vit", {"model.patch_size": 3}, ["model.patch_size", "3", "model.image_size = 8"]),
        ("digits:vit", {"model.image_size": 16}, ["data.image_size=8", "model.image_size=16"]),
        ("digits:vit", {"data.objective": "causal", "data.source": "synthetic"}, ["model.kind=vit", "classify"]),
    ],
)
def test_bad_setting_error_names_key_value_and_fix(name: str, changes: dict[str, Any], words: list[str]) -> None:
    """What models check beyond the declarations of their keys, of which tests/test_schema.py tries every one."""
    values = load(name).to_dict()
    for key, value in changes.items():
        part, _, last = key.partition(".")
        values[part][last] = value
    with pytest.raises(ValueError) as error:
        Config.from_dict(values)
    message = str(error.value)
    assert all(word in message for word in words) and "\n" not in message, message


def test_sequence_longer_than_max_len_is_rejected() -> None:
    for section in (DecoderConfig(max_len=8), EncoderConfig(max_len=8)):
        model = models.build(section)
        assert isinstance(model, models.Decoder | models.Encoder)
        tokens = jax.ShapeDtypeStruct((1, 9), "int32")
        params = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
        with pytest.raises(ValueError, match="9 tokens is longer than model.max_len = 8"):
            jax.eval_shape(lambda p, t, m=model: m.logits(p, t, lambda _, tree: tree), params, tokens)
