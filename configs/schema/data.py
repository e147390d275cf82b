"""The section `data`: the source of the examples, and their preparation."""

from dataclasses import dataclass

from configs.schema.keys import Section, key

TFDS = "tfds:NAME"
SOURCES = ("stdlib_text", "folder", "synthetic", "digits", TFDS)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The source of the examples, and their preparation."""

    SECTION = "data"

    source: str = key(
        "stdlib_text",
        "where examples come from; digits are images, tfds:NAME is any TFDS data set of text or images",
        choices=SOURCES,
    )
    path: str = key("", "folder: directory of the text files; tfds: data_dir, empty for the default", resumable=True)
    tokenizer: str = key("bytes", "tokenizer of text", choices=("bytes", "sentencepiece", "tiktoken", "hugging_face"))
    tokenizer_path: str = key(
        "", "vocabulary file of a sentencepiece or tiktoken tokenizer, or a tokenizer.json", resumable=True
    )
    seq_len: int = key(256, "tokens of a text example", least=1, unit="tokens")
    objective: str = key(
        "causal",
        "what the model learns: causal and masked for text, classify for images",
        choices=("causal", "masked", "classify"),
    )
    mask_rate: float = key(0.15, "masked: share of tokens to predict", above=0, most=1)
    image_size: int = key(8, "classify: height and width of an image", least=1, unit="pixels")
    channels: int = key(1, "classify: 1 for grey, 3 for colour", choices=(1, 3))
    augment: str = key(
        "none",
        "classify: crop_flip takes random crops and mirrors half of them; validation uses the centre",
        choices=("none", "crop_flip"),
    )
    prefetch: int = key(4, "batches prepared in the background; 0 for none", least=0, unit="batches", resumable=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == TFDS:
            raise ValueError("data.source is 'tfds:NAME': replace NAME by a TFDS data set, such as 'tfds:lm1b'")
        if not self.source.startswith("tfds:") and (self.source == "digits") != (self.objective == "classify"):
            wanted = "'classify'" if self.source == "digits" else "'causal' or 'masked'"
            raise ValueError(
                f"data.objective={self.objective!r} does not fit data.source={self.source!r}; set data.objective to "
                f"{wanted}"
            )
        if self.source == "folder" and not self.path:
            raise ValueError("data.path is empty: data.source='folder' needs the folder of the text files in data.path")
        if self.path and self.source in ("stdlib_text", "synthetic", "digits"):
            raise ValueError(
                f"data.path is {self.path!r} but data.source={self.source!r} reads no path: "
                "set data.source='folder' (or 'tfds:NAME'), or leave data.path empty"
            )
        if self.tokenizer != "bytes" and not self.tokenizer_path:
            raise ValueError(
                f"data.tokenizer_path is empty: data.tokenizer={self.tokenizer!r} needs its vocabulary file"
            )
        if self.tokenizer == "bytes" and self.tokenizer_path:
            raise ValueError(
                f"data.tokenizer_path is {self.tokenizer_path!r} but data.tokenizer='bytes' reads no file: "
                "set data.tokenizer to the kind of that file, or leave data.tokenizer_path empty"
            )
        if self.source == "synthetic" and self.tokenizer != "bytes":
            raise ValueError(f"data.tokenizer is {self.tokenizer!r}: data.source='synthetic' works with 'bytes' only")
