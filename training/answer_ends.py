"""The special token that ends an answer: whether chats train it, and which token a chat template writes."""

import numpy as np

from input_pipeline import Dataset, MixedDataset
from input_pipeline.chat_template import ChatTemplate
from input_pipeline.chats import ChatDataset
from input_pipeline.tokenizers import HuggingFace

EXAMPLE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ROWS = 64  # rows of a data set that are inspected
LAST = 2  # inspected tokens at the end of an answer: templates write a line break after the special token


def end_of_answers(tokenizer: HuggingFace, template: ChatTemplate) -> int | None:
    """Returns the id of an answer's last special token; None if the template writes none or refuses a question."""
    try:
        text, spans = template.spans(EXAMPLE, [1])
    except ValueError:  # for example, a template that requires a system message first
        return None
    ids, characters = tokenizer.encode_template(text)
    inside = [any(start < e and end > s for s, e in spans) for start, end in characters.tolist()]
    answer = [number for number, is_inside in zip(ids.tolist(), inside, strict=True) if is_inside]
    return next((number for number in reversed(answer) if number in tokenizer.special_ids), None)


def warnings(train: Dataset) -> list[str]:
    """Returns a line for each data set of chats in whose first rows no answer ends with a special token."""
    parts = [part.examples for part in train.parts] if isinstance(train, MixedDataset) else [train]
    return [
        f"warning: no answer in the first rows of the chats ends with a special token ({part.summary}): the model "
        "will not learn to stop; write one at the end of an answer in the chat template"
        for part in parts
        if isinstance(part, ChatDataset) and not _has_an_end(part)
    ]


def _has_an_end(chats: ChatDataset) -> bool:
    """Whether an answer in the first rows ends with a special token."""
    assert isinstance(chats.tokenizer, HuggingFace)
    for row in (chats[i] for i in range(min(ROWS, len(chats)))):
        is_answer = np.append(row["weights"] > 0, False)
        is_special = np.isin(row["targets"], chats.tokenizer.special_ids) & is_answer[:-1]
        ends = np.flatnonzero(is_answer[:-1] & ~is_answer[1:])
        if any(is_special[max(0, end + 1 - LAST) : end + 1].any() for end in ends):
            return True
    return False
