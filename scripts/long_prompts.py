"""Questions about long documents: to summarize one, to quote from one, to change code.

    python scripts/long_prompts.py --tokens 3000 --count 12 --out long.jsonl
    python scripts/tokens_per_sec.py --rows plain,eagle,ngram,fused --data long.jsonl

Documents are chapters of Python's language reference, as `pydoc` has them, and modules of its
library, cut to a length in tokens. Same Python and arguments, same questions.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from pydoc_data.topics import topics

import click

from fasteagle.cli.command import Script
from fasteagle.cli.options import RESULT
from fasteagle.errors import FasteagleError, counted
from fasteagle.loading.open import open_model
from fasteagle.loading.tokenizer import ChatTokenizer
from fasteagle.options import RuntimeOptions
from fasteagle.prompts import write_questions

MODULES = "textwrap heapq shlex fnmatch queue sched string calendar csv statistics bisect copy"
SUMMARIZE = "Summarize the following text in ten sentences.\n\n{text}"
QUOTE = '{text}\n\nQuote the paragraph of this text that contains "{words}", word for word.'
RENAME = (
    "```python\n{text}\n```\n\nRename every variable called `{name}` to `{name}_value` in this "
    "code, and print all of the code."
)


def documents(texts: list[str], tokenizer: ChatTokenizer, n_tokens: int) -> list[str]:
    """Return the first `n_tokens` tokens of each text that has so many."""
    ids = [tokenizer.encode(text) for text in texts]
    long = [tokenizer.decode(own[:n_tokens]) for own in ids if len(own) >= n_tokens]
    if not long:
        raise FasteagleError(f"no document has {n_tokens:,} tokens: ask for fewer")
    return long


def questions(tokenizer: ChatTokenizer, n_tokens: int) -> Iterator[str]:
    """Yield questions about documents of `n_tokens` tokens without end, the kinds in turn."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    code = [(folder / f"{name}.py").read_text("utf-8") for name in MODULES.split()]
    chapters = cycle(documents([topics[name] for name in sorted(topics)], tokenizer, n_tokens))
    modules = cycle(documents(code, tokenizer, n_tokens))
    for chapter, other, module in zip(chapters, chapters, modules, strict=False):
        yield SUMMARIZE.format(text=chapter)
        yield QUOTE.format(text=other, words=_middle_words(other))
        yield RENAME.format(text=module, name=_argument(module))


def _middle_words(text: str) -> str:
    """Return the first words of the longest paragraph of the text's second half."""
    paragraph = max(text[len(text) // 2 :].split("\n\n")[1:] or [text], key=len)
    return " ".join(paragraph.split()[:6])


def _argument(code: str) -> str:
    """Return the first argument of the first function that has one, besides `self`."""
    for line in code.splitlines():
        if line.strip().startswith("def "):
            names = line.partition("(")[2].replace(")", ",").replace(":", ",").split(",")
            names = [name.split("=")[0].strip(" *") for name in names]
            names = [name for name in names if name.isidentifier() and name not in ("self", "cls")]
            if names:
                return names[0]
    return "x"


@click.command(cls=Script, help=__doc__)
@click.option("--model", default="smollm2-135m", show_default=True, help="Tokenizer.")
@click.option(
    "--tokens",
    "n_tokens",
    type=click.IntRange(1),
    default=3000,
    show_default=True,
    help="Tokens of each document.",
)
@click.option("--count", type=click.IntRange(1), default=12, show_default=True, help="Prompts.")
@click.option("--out", required=True, type=RESULT)
def main(model: str, n_tokens: int, count: int, out: Path) -> None:
    tokenizer = open_model(model, RuntimeOptions()).tokenizer
    texts = list(islice(questions(tokenizer, n_tokens), count))
    write_questions(out, ([text] for text in texts))
    lengths = [len(tokenizer.encode(text)) for text in texts]
    what = counted(len(texts), "question")
    click.echo(f"{what} of {min(lengths):,} to {max(lengths):,} tokens", err=True)


if __name__ == "__main__":
    main()
