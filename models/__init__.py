"""Models, written on named dims and without sharding. `make_model` creates the model of a config."""

from configs.schema import Config, ModelConfig
from configs.schema.own import OWN
from models.decoder import Decoder
from models.encoder import Encoder
from models.experts import Moe
from models.model import Classifier, Gather, Model, Params  # noqa: F401
from models.resnet import ResNet
from models.transformer import with_attention
from models.vit import ViT

KINDS = {"decoder": Decoder, "moe": Moe, "encoder": Encoder, "resnet": ResNet, "vit": ViT}


def make_model(config: Config) -> Model:
    """Returns the model of a config, with the attention kernel that suits these devices."""
    return build(with_attention(config))


def build(config: ModelConfig) -> Model:
    """Returns the model that a config section describes."""
    return {**KINDS, **OWN["model"]}[config.kind](config)
