"""`register`: gives something of one's own a name that a config can choose (docs/extending.md has an example of each).

    from configs.register import register

    register("optimizer", "lion", lion)
    config.optimizer.name = "lion"

A config file calls it when it is imported, so the name is known wherever the same `--config` is given.
"""

from typing import Any

from configs.schema import known_keys, nearest
from configs.schema.own import OWN


def register(topic: str, name: str, value: Any) -> None:
    """Makes `name` a choice of the topic's keys. What `value` is depends on the topic:

    - `model`: a subclass of models.Model whose field `config` is annotated with its ModelConfig
    - `source`: `source(config, split)`, which returns a TextSource, or Images if data.objective is classify
    - `tokenizer`: `tokenizer(path)`, which returns a Tokenizer; `path` is data.tokenizer_path
    - `codec`: `codec(config)`, which returns a Codec from the section `compression`
    - `hop_two`: a HopTwo
    - `strategy`: the scopes of parameters, gradients and optimizer state; each none, node, all or a number of devices
    - `optimizer`: `optimizer(config, schedule, mask)`, which returns an optax transform; `mask` says what decays
    - `schedule`: `schedule(config, num_steps)`, which returns the learning rate by step, from 0, after the warm-up

    ValueError for an unknown topic, and for a name that is no identifier or that something else already has.
    """
    if topic not in OWN:
        raise ValueError(
            f"register({topic!r}, {name!r}): the topic must be {nearest(topic, [*OWN])}, or another of {', '.join(OWN)}"
        )
    if not name.isidentifier():
        raise ValueError(f"register({topic!r}, {name!r}): the name must be letters, digits and _, like my_{topic}")
    for key, declared in known_keys("decoder").items():
        others = [other for other in declared.topics if other != topic]
        taken = (*declared.choices, *(taken for other in others for taken in OWN[other]))
        if topic in declared.topics and name in taken:
            raise ValueError(f"register({topic!r}, {name!r}): {key}={name} exists already; choose another name")
    OWN[topic][name] = value
