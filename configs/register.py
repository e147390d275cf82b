"""`register`: adds a user's choice to a config key by name (docs/extending.md has an example of each kind).

    from configs.register import register

    register("optimizer", "lion", lion)
    config.optimizer.name = "lion"

A config file calls it when it is imported, so the name is known wherever the same `--config` is given.
"""

from collections.abc import Mapping

from configs.schema import flat, known_keys, nearest
from configs.schema.mixture import parse
from configs.schema.own import OWN


def register(topic: str, name: str, value: object) -> None:
    """Makes `name` a choice of the topic's keys. The type of `value` depends on the topic:

    - `model`: a subclass of models.Model whose field `config` is annotated with its ModelConfig
    - `source`: `source(config, split)`, which returns a TextSource, or Images if data.objective is classify
    - `tokenizer`: `tokenizer(path)`, which returns a Tokenizer; `path` is data.tokenizer_path
    - `codec`: `codec(config)`, which returns a Codec from the section `compression`
    - `all_reduce`: an AllReduceMethod
    - `interval`: an Interval (training/intervals.py), which chooses the steps between exchanges of local SGD
    - `strategy`: the scopes of parameters, gradients and optimizer state; each none, node, all or a number of devices
    - `optimizer`: `optimizer(config, schedule, mask)`, which returns an optax transform; `mask`: parameters that decay
    - `schedule`: `schedule(config, num_steps)`, which returns the learning rate by step, from 0, after the warm-up

    ValueError for an unknown topic, and for a name that is not an identifier or is already taken.
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


def unknown_names(values: Mapping[str, object]) -> dict[str, str]:
    """Returns the names in sections of a saved config that are neither built in nor registered, by their keys."""
    given, known = flat(values), known_keys("decoder")
    names = [(key, given[key], declared) for key, declared in known.items() if declared.topics and key in given]
    sources = (component.source for component in parse(given.get("data.mixture", "")))
    names += [("data.mixture", source, known["data.source"]) for source in sources]
    return {key: name for key, name, declared in names if not declared.is_choice(name)}
