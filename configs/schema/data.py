"""The section `data`: the source of the examples, and their preparation."""

from dataclasses import dataclass, replace

from configs.schema.keys import Section, key
from configs.schema.mixture import Component, parse, refuse_secrets

TFDS = "tfds:NAME"
TOKENIZERS = ("bytes", "sentencepiece", "tiktoken", "hugging_face")
PATHS = {  # the content of data.path by source
    "folder": "the folder of the text files",
    "shards": "a folder or URL (s3, gs, http, https)",
    "chats": "a file of conversations, or a folder or URL (s3, gs, http, https) of such files,",
}
NEEDED_BY_CHATS = (  # a key, its value, and why
    ("tokenizer", "hugging_face", "a tokenizer.json with a chat template beside it (docs/data.md)"),
    ("objective", "causal", "to predict answers"),
    ("packing", "whole", "rows of whole conversations"),
)
ROLES = ("system", "developer", "user", "assistant", "tool")  # of messages in chats
SOURCES = ("stdlib_text", "folder", "shards", "chats", "synthetic", "digits", TFDS)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section, name="data"):
    """The source of the examples, and their preparation."""

    source: str = key("stdlib_text", "where examples come from", choices=SOURCES, topics=("source",))
    path: str = key(
        "",
        "folder: of text; shards: folder or s3, gs, http(s) URL; chats: file, folder or URL; tfds: data_dir",
        resumable=True,
    )
    mixture: str = key("", "several text sources: WEIGHT SOURCE[:PATH], separated by commas")
    pattern: str = key("", "folder, shards, chats: glob of files below path; empty for all", resumable=True)
    text_field: str = key("text", "shards: field or column of the text", resumable=True)
    loss_on: str = key("assistant", "chats: messages in the loss: last (turn), marked, or roles with commas")
    skip_bad: int = key(0, "broken documents that may be skipped", least=0, unit="documents", resumable=True)
    shuffle_shards: int = key(4, "shards: files whose windows are shuffled together", least=1, unit="files")
    cache_gb: float = key(0.0, "shards: disk space of a node; 0: no limit", least=0, unit="GB", resumable=True)
    tokenizer: str = key("bytes", "tokenizer of text", choices=TOKENIZERS, topics=("tokenizer",))
    tokenizer_path: str = key("", "vocabulary file, or tokenizer.json", resumable=True)
    add_bos: str = key(
        "auto",
        "begin documents with the tokenizer's bos token; auto: as its files say",
        choices=("auto", "always", "never"),
        resumable=True,
    )
    eos_token: str = key(
        "",
        "hugging_face: token that ends a document; default: by tokenizer_config.json",
        resumable=True,
    )
    seq_len: int = key(256, "tokens of a text example", least=1, unit="tokens")
    objective: str = key(
        "causal", "task: causal or masked for text, classify for images", choices=("causal", "masked", "classify")
    )
    packing: str = key(
        "stream",
        "rows: windows of the token stream; with attention within documents; whole documents, padded",
        choices=("stream", "documents", "whole"),
    )
    mask_rate: float = key(0.15, "masked: share of tokens to predict", above=0, most=1)
    image_size: int = key(8, "classify: height and width of images", least=1, unit="pixels")
    channels: int = key(1, "classify: 1 for grey, 3 for colour", choices=(1, 3))
    augment: str = key(
        "none",
        "classify: random crops (ImageNet) or shifts (CIFAR), and mirroring",
        choices=("none", "crop_flip", "shift_flip"),
    )
    prefetch: int = key(4, "batches prepared in the background", least=0, unit="batches", resumable=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_secrets("data.path", self.path)
        if self.mixture:  # each component is checked as if it were the only source
            if self.objective == "classify":
                raise ValueError("data.mixture is of text: with data.objective='classify' leave it empty")
            for component in self.components:
                try:
                    self.alone(component)
                except ValueError as error:
                    raise ValueError(f"data.mixture, component {component.name}: {error}") from error
            return
        if self.source == TFDS:
            raise ValueError("data.source is 'tfds:NAME': replace NAME by a TFDS data set, such as 'tfds:lm1b'")
        fixed = self.source in SOURCES and self.source != "synthetic"  # the others have text or images
        if fixed and (self.source == "digits") != (self.objective == "classify"):
            wanted = "'classify'" if self.source == "digits" else "'causal' or 'masked'"
            raise ValueError(
                f"data.objective={self.objective!r} does not fit data.source={self.source!r}; set data.objective to "
                f"{wanted}"
            )
        if self.source in PATHS and not self.path:
            what = PATHS[self.source]
            raise ValueError(f"data.path is empty: data.source={self.source!r} needs {what} in data.path")
        if self.pattern and self.source not in PATHS:
            raise ValueError(
                f"data.pattern is {self.pattern!r} but data.source={self.source!r} reads no files by name: "
                "set data.source to 'folder', 'shards' or 'chats', or leave data.pattern empty"
            )
        if self.path and self.source in ("stdlib_text", "synthetic", "digits"):
            raise ValueError(
                f"data.path is {self.path!r} but data.source={self.source!r} reads no path: "
                "set data.source='folder' (or 'shards', 'chats', 'tfds:NAME'), or leave data.path empty"
            )
        if self.tokenizer in TOKENIZERS[1:] and not self.tokenizer_path:
            raise ValueError(
                f"data.tokenizer_path is empty: data.tokenizer={self.tokenizer!r} needs its vocabulary file"
            )
        if self.tokenizer == "bytes" and self.tokenizer_path:
            raise ValueError(
                f"data.tokenizer_path is {self.tokenizer_path!r} but data.tokenizer='bytes' reads no file: "
                "set data.tokenizer to the kind of that file, or leave data.tokenizer_path empty"
            )
        if self.add_bos == "always" and self.tokenizer not in ("sentencepiece", "hugging_face"):
            raise ValueError(f"data.add_bos='always': data.tokenizer={self.tokenizer!r} has no <bos>; leave it at auto")
        if self.eos_token and self.tokenizer != "hugging_face":
            raise ValueError(
                f"data.eos_token is {self.eos_token!r} but data.tokenizer={self.tokenizer!r} has an end of its own: "
                "leave data.eos_token empty"
            )
        if self.source == "synthetic" and self.tokenizer != "bytes":
            raise ValueError(f"data.tokenizer is {self.tokenizer!r}: data.source='synthetic' works with 'bytes' only")
        roles = self.loss_on.split(",")
        if self.loss_on not in ("last", "marked") and not {*roles} <= {*ROLES}:
            raise ValueError(f"data.loss_on={self.loss_on!r} must be last, marked, or roles of {', '.join(ROLES)}")
        for name, value, why in NEEDED_BY_CHATS if self.source == "chats" else ():
            if (found := getattr(self, name)) != value:
                raise ValueError(f"data.{name}={found!r}: data.source='chats' needs data.{name}={value!r}, {why}")
        if self.packing != "stream" and (self.objective == "classify" or self.source == "synthetic"):
            what = "images" if self.objective == "classify" else "the tokens of data.source='synthetic'"
            raise ValueError(f"data.packing={self.packing!r}: {what} are not documents; set data.packing='stream'")
        if self.packing == "whole" and self.source == "shards":
            raise ValueError("data.packing='whole' needs all text at once: with data.source='shards' use 'documents'")

    @property
    def components(self) -> tuple[Component, ...]:
        """The components of the mixture; () for a single source."""
        return parse(self.mixture)

    @property
    def origin(self) -> str:
        """Where the examples come from, for messages."""
        return f"data.mixture={self.mixture!r}" if self.mixture else f"data.source={self.source}"

    def alone(self, component: Component) -> "DataConfig":
        """Returns the section with a component of the mixture as its only source."""
        pattern = self.pattern if component.source in PATHS else ""
        return replace(self, mixture="", source=component.source, path=component.path, pattern=pattern)
