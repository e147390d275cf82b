"""Models: maths on named dims. `build` turns the `model` section of a config into one."""

from configs import door
from models.decoder import Decoder, DecoderConfig
from models.encoder import Encoder, EncoderConfig
from models.model import Gather, Model, Params
from models.settings import require_one_of

__all__ = ["Decoder", "DecoderConfig", "Encoder", "EncoderConfig", "Gather", "Model", "Params", "build"]


def build(section: door.Config) -> Model:
    """Returns the model that a config section describes; a ValueError names the key that is wrong."""
    if "kind" not in section:
        raise ValueError("model.kind is missing; choose decoder or encoder")
    require_one_of("kind", section["kind"], ("decoder", "encoder"))
    if section["kind"] == "decoder":
        return Decoder(door.settings(DecoderConfig, section, "model"))
    return Encoder(door.settings(EncoderConfig, section, "model"))
