"""Small vocabulary files for the tests of tokenizers."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def tiktoken_file(path: Path, merges: list[bytes]) -> Path:
    pieces = [bytes([byte]) for byte in range(256)] + merges
    path.write_bytes(b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces)))
    return path


def tokenizer_json(path: Path, special: Sequence[str] = ("<|endoftext|>", "<mask>")) -> Path:
    """Writes a byte-level BPE tokenizer of at most 260 ids, with special tokens, truncation and padding."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=260, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the quick brown fox the the quick"] * 10, trainer)
    made.enable_truncation(4)
    made.enable_padding(length=16, pad_token=special[0] if special else "a")
    made.save(str(path))
    return path


def word_level(path: Path, vocabulary: dict[str, int], **model: Any) -> Path:
    """Writes a tokenizer.json whose tokens are whole words, `<|endoftext|>` the special one."""
    special = {"id": vocabulary["<|endoftext|>"], "content": "<|endoftext|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [special | flags],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"} | model,
    }
    path.write_text(json.dumps(content))
    return path


def with_image_token(path: Path) -> Path:
    """Adds a special token after all others, like Gemma 3's image token, which its text models lack."""
    import tokenizers

    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_special_tokens(["<image_soft_token>"])
    made.save(str(path))
    return path
