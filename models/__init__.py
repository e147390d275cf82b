"""Models, written on named dims and without sharding. `build` creates a model from a config's `model` section."""

from configs.schema import ModelConfig
from configs.schema.own import OWN
from models.decoder import Decoder
from models.encoder import Encoder
from models.experts import Moe
from models.model import Classifier, Gather, Model, Params  # noqa: F401
from models.resnet import ResNet
from models.vit import ViT

KINDS = {"decoder": Decoder, "moe": Moe, "encoder": Encoder, "resnet": ResNet, "vit": ViT}


def build(config: ModelConfig) -> Model:
    """Returns the model that a config section describes."""
    return {**KINDS, **OWN["model"]}[config.kind](config)
