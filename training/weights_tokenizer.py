"""Checks that the weights of a new run fit its model, and its tokenizer the tokenizer files of `model.weights`."""

import logging
from pathlib import Path

import jax

from configs.schema import Config, TransformerConfig
from input_pipeline import tokenizer_config
from input_pipeline.tokenizer_config import CONFIG_FILE
from input_pipeline.tokenizers import HuggingFace, SentencePiece, Tokenizer
from runtime.files.paths import user_path
from training.experiment import Experiment

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
# words, digits, accents, another script, an emoji, indented code: their ids distinguish tokenizers
PROBE = "The year 1984: na\u00efve caf\u00e9s in \u6771\u4eac \U0001f600\n\tdef square(x):\n        return x**2\n"
LEAST_USED = 0.9  # fraction of the vocabulary; embeddings are padded by a few percent


def check_weights(experiment: Experiment, tokenizer: Tokenizer | None) -> None:
    """Raises ValueError if the weights from which a new run starts do not fit its model or its tokenizer.

    Only headers are read.
    """
    experiment.open_weights()
    experiment.open_adapters()
    if tokenizer:
        check_tokenizer(experiment.config, tokenizer)


def check_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """Compares a run's tokenizer with the files next to its weights, if it has any.

    ValueError if it gives different ids. Process 0 warns of suspicious differences.
    """
    model, data = config.model, config.data
    if not isinstance(model, TransformerConfig) or not model.weights:
        return
    folder = user_path(model.weights)
    theirs, there, unreadable = _tokenizer_of(folder, data.tokenizer)
    if theirs and (why := difference(tokenizer, theirs)):
        kind = "sentencepiece" if isinstance(theirs, SentencePiece) else "hugging_face"
        raise ValueError(
            f"data.tokenizer={data.tokenizer} is not the tokenizer of model.weights={folder}: {why}; set "
            f"data.tokenizer={kind} and data.tokenizer_path={there}"
        )
    doubt = unreadable and f"they could not be compared, {unreadable}"
    doubt = doubt or _doubt(folder, theirs, tokenizer, config)
    if jax.process_index() == 0 and doubt:
        logging.getLogger(__name__).warning(
            "warning: data.tokenizer=%s may not be the tokenizer of model.weights=%s: %s", data.tokenizer, folder, doubt
        )


def difference(ours: Tokenizer, theirs: Tokenizer) -> str:
    """Returns a difference between two tokenizers, "" if none is detected. Ours may have more tokens."""
    if isinstance(ours, HuggingFace) and isinstance(theirs, HuggingFace):
        for token, number in sorted(theirs.vocabulary.items(), key=lambda pair: pair[1]):
            if ours.vocabulary.get(token) != number:
                return f"{token!r} has the id {ours.vocabulary.get(token)}, but {number} there"
    elif ours.num_ids < theirs.num_ids:
        return f"it has {ours.num_ids} ids, but {theirs.num_ids} there"
    here, there = (one.encode(PROBE).tolist() for one in (ours, theirs))
    if here != there:
        return f"a sample text begins with the ids {here[:5]}, but with {there[:5]} there"
    return ""


def _tokenizer_of(folder: Path, kind: str) -> tuple[Tokenizer | None, Path, str]:
    """Returns the usable tokenizer in a folder or None, its file, and the reason if it cannot be used."""
    kinds = [(SentencePiece, name) for name in SENTENCEPIECE_FILES if kind == "sentencepiece"]
    for make, name in [*kinds, (HuggingFace, TOKENIZER_FILE)]:
        file = folder / name
        if file.is_file():
            try:
                theirs = make(file)
                theirs.encode(PROBE)
                return theirs, file, ""
            except ValueError as error:  # damaged, no token to end documents, cannot encode this text
                return None, file, str(error).removeprefix("data.tokenizer_path ")
    return None, folder / TOKENIZER_FILE, ""


def _doubt(folder: Path, theirs: Tokenizer | None, ours: Tokenizer, config: Config) -> str:
    """Returns a suspicious property of a tokenizer, or ""."""
    vocab_size = config.values["model.vocab_size"]
    if theirs is None and ours.num_ids < LEAST_USED * vocab_size:
        return f"it has {ours.num_ids} ids, and they have vocab_size={vocab_size}"
    if not isinstance(ours, HuggingFace) or config.data.source == "chats":  # chats use the template's ends
        return ""
    if (ends := _end_token(folder)) and ends != ours.separator_token:
        return f"documents end with {ours.separator_token!r}, and {CONFIG_FILE} there says {ends!r}"
    if isinstance(theirs, HuggingFace) and theirs.adds_bos and config.data.add_bos == "auto" and not ours.adds_bos:
        return f"documents and prompts begin with {theirs.bos_token!r} by the files there; set data.add_bos=always"
    if ours.bos_is_unclear:
        return f"no file says whether texts begin with {ours.bos_token!r}; set data.add_bos to always or never"
    return ""


def _end_token(folder: Path) -> str:
    """Returns the token that ends a text according to `tokenizer_config.json`, or ""."""
    try:
        named = tokenizer_config.named_tokens(tokenizer_config.read(folder))
    except ValueError:
        return ""
    return named.get("eos_token") or named.get("sep_token") or ""
