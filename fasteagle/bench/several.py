"""Total speed of several answers at once, plain and with drafting: the EAGLE paper's table 7.

Each size runs all questions, of one turn each, plain and with drafting in turn, `ROUNDS` times, on
a card once more before, when graphs are captured; speeds are medians of all tokens over all time,
prompts included.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence

from fasteagle.answering.answer_logits import AnswerRequest
from fasteagle.bench.measure import add_barrier
from fasteagle.bench.options import BenchOptions
from fasteagle.compile.blocks import compile_now
from fasteagle.compile.costs import tune_now
from fasteagle.device import available_bytes
from fasteagle.errors import note, with_progress
from fasteagle.llm import LLM
from fasteagle.options import AnswerOptions
from fasteagle.prompts import Question
from fasteagle.sampling import SamplingMode

ROUNDS = 3
HEADINGS = ("at once", "plain tok/s", "x one", "drafting tok/s", "x one", "x plain", "same text")


@dataclasses.dataclass
class Size:
    """Measured speeds at one number of answers at once, in tokens per second."""

    n: int
    n_texts: int
    one: float = 0.0  # speed of plain decoding alone
    plain: list[float] = dataclasses.field(default_factory=list)
    drafting: list[float] = dataclasses.field(default_factory=list)
    barriers: list[float] = dataclasses.field(default_factory=list)
    same: int = 0  # texts that are those of plain decoding alone, in the last round

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        plain, drafting = statistics.median(self.plain), statistics.median(self.drafting)
        return (
            str(self.n),
            f"{plain:.1f}",
            f"{plain / self.one:.2f}",
            f"{drafting:.1f}",
            f"{drafting / self.one:.2f}",
            f"{drafting / plain:.2f}",
            f"{self.same} of {self.n_texts}",
        )


def measure_sizes(
    llm: LLM, questions: Sequence[Question], sizes: Sequence[int], options: BenchOptions
) -> list[Size]:
    """Return the speeds at these numbers of answers at once."""
    kind = SamplingMode.of(options.params, llm.engine.model.config.vocab_size)
    if options.compile and compile_now(llm.engine, options.params):
        tune_now(llm.engine, note, kind, compiled=True)
    answering = AnswerOptions(max_new_tokens=options.max_new_tokens)

    def requests(speculate: bool) -> list[AnswerRequest]:
        prompts = (llm.prompt([{"role": "user", "content": q[0]}]) for q in questions)
        return [
            llm.made_request(prompt.ids, options.params, answering, speculate=speculate)
            for prompt in prompts
        ]

    expected = [answer.tokens for answer in llm.answers.all(requests(False), 1)]
    measured = {n: Size(n, len(questions)) for n in (1, *sizes)}
    warm_ups = int(not llm.engine.on_cpu)
    todo = [size for _ in range(warm_ups + ROUNDS) for size in measured.values()]
    for size in with_progress(todo, "measured", "sizes", note):
        for speculate, speeds in ((False, size.plain), (True, size.drafting)):
            batch = requests(speculate)
            llm.answers.forget()  # prompts count
            add_barrier(size.barriers, llm.engine)
            begin = time.perf_counter()
            texts = [answer.tokens for answer in llm.answers.all(batch, size.n)]
            speeds.append(sum(map(len, texts)) / (time.perf_counter() - begin))
            size.same = sum(a == b for a, b in zip(texts, expected, strict=True))
    for size in measured.values():
        del size.plain[:warm_ups], size.drafting[:warm_ups]
        size.one = statistics.median(measured[1].plain)
    return [measured[n] for n in sizes]


def largest_batch(llm: LLM) -> str:
    """Return a line on how many texts of the full context fit into the memory that is free."""
    engine = llm.engine
    each = engine.max_seq_len * engine.slot_bytes
    line = f"a text of {engine.max_seq_len:,} tokens takes {each / 2**30:.2f} GiB of KV cache"
    free = available_bytes(engine.device)
    return line if free is None else f"{line}; memory is free for {free // each:,} of them"
