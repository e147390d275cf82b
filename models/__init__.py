"""Models: maths on named dims. `build` turns the `model` section of a config into one."""

from configs import door
from models.decoder import Decoder, DecoderConfig
from models.encoder import Encoder, EncoderConfig
from models.model import Gather, Model, Params
from models.resnet import ResNet, ResNetConfig
from models.settings import require_one_of
from models.transformer import Transformer

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Encoder",
    "EncoderConfig",
    "Gather",
    "Model",
    "Params",
    "ResNet",
    "ResNetConfig",
    "Transformer",
    "build",
]

KINDS = {"decoder": (Decoder, DecoderConfig), "encoder": (Encoder, EncoderConfig), "resnet": (ResNet, ResNetConfig)}


def build(section: door.Config) -> Model:
    """Returns the model that a config section describes; a ValueError names the key that is wrong."""
    if "kind" not in section:
        raise ValueError(f"model.kind is missing; choose {', '.join(KINDS)}")
    require_one_of("kind", section["kind"], tuple(KINDS))
    model, config = KINDS[section["kind"]]
    return model(door.settings(config, section, "model"))
