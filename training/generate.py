"""Continues prompts with a trained decoder.

    python -m training.generate --workdir=RUN [--step=N] [--prompt=TEXT] [--length=N] [--temperature=X] [--seed=N]
    python -m training.generate --hugging_face=DIR --prompts=FILE --chat

Prompt, length (tokens, fewer if model.max_len is reached), temperature (0: always the most likely token) and seed
default to the values of the run's sample. If its length is 0, the default is 200. FILE has one prompt per line. For
each prompt, a JSON object with `prompt` and `text` is printed. With --chat, a prompt is a user's message in the
tokenizer's chat template, and only the answer is printed, up to its first special token. The newest checkpoint is read,
or the checkpoint of step N. If the run's config file registered the model or the tokenizer, that file is loaded again,
or the file given as --config=FILE. The program uses all local devices, in one process. JAX_NUM_CPU_DEVICES=8 simulates
several. Exit codes: 0 done; 2 a mistake in a flag or a file; 1 anything else.
"""

import json
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from absl import flags

from configs.schema import SampleConfig
from input_pipeline.chat_template import ChatTemplate
from input_pipeline.folder import read_text
from input_pipeline.tokenizers import HuggingFace
from runtime.command_line import prepare_output
from runtime.files.paths import user_path
from training import trained
from training.sampling import Continuation


def main(argv: Sequence[str]) -> int:
    """Runs the program and returns its exit code. A user's mistake is reported in one line."""
    prepare_output()
    values = trained.new_flags()
    flags.DEFINE_string("prompt", None, "text to continue", flag_values=values)
    flags.DEFINE_string("prompts", None, "file with a prompt per line", flag_values=values)
    flags.DEFINE_integer("length", None, "tokens to add", lower_bound=1, flag_values=values)
    flags.DEFINE_float("temperature", None, "sampling temperature", lower_bound=0, flag_values=values)
    flags.DEFINE_integer("seed", None, "seed of the samples", lower_bound=0, flag_values=values)
    flags.DEFINE_boolean("chat", False, "prompts are messages of a user", flag_values=values)

    def run() -> None:
        if values.prompt is not None and values.prompts:
            raise ValueError("give either --prompt=TEXT or --prompts=FILE")
        text = read_text(user_path(values.prompts)) if values.prompts else ""
        lines = [prompt for line in text.split("\n") if (prompt := line.removesuffix("\r"))]
        if values.prompts and not lines:
            raise ValueError(f"--prompts={values.prompts} is empty; write a prompt per line")
        model = trained.named(values)
        config = model.config.sample
        prompts = lines or [config.prompt if values.prompt is None else values.prompt]
        texts = generate(
            model,
            prompts,
            length=values.length or config.length or SampleConfig().length,
            temperature=config.temperature if values.temperature is None else values.temperature,
            seed=model.config.seed if values.seed is None else values.seed,
            chat=values.chat,
        )
        for prompt, text in zip(prompts, texts, strict=True):
            print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) if lines else text)

    return trained.program(argv, __doc__ or "", values, run)


def generate(
    model: trained.Trained, prompts: Sequence[str], *, length: int, temperature: float, seed: int, chat: bool
) -> Iterator[str]:
    """Yields each prompt with a continuation of up to `length` tokens, or only the answer if `chat`.

    ValueError for a model that is not a decoder, a prompt that is too long, and a tokenizer without a chat template.
    """
    tokenizer = model.tokenizer()
    samples = Continuation(model.experiment, temperature=temperature, seed=seed)

    def continued(ids: np.ndarray, prompt: str) -> np.ndarray:
        room = samples.room(ids, f"the prompt {prompt[:40]!r}")
        return samples(model.params, ids, min(length, room))

    if not chat:
        yield from (tokenizer.continued(continued(tokenizer.prompt(prompt), prompt)) for prompt in prompts)
        return
    if not isinstance(tokenizer, HuggingFace):
        raise ValueError(f"data.tokenizer={model.config.data.tokenizer} has no chat template; leave out --chat")
    template = ChatTemplate(user_path(model.config.data.tokenizer_path))
    for prompt in prompts:
        ids, _ = tokenizer.encode_template(template.render([{"role": "user", "content": prompt}], asks=True))
        answer = continued(ids, prompt)[len(ids) :]
        yield tokenizer.decode(np.split(answer, np.flatnonzero(np.isin(answer, tokenizer.special_ids)))[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
