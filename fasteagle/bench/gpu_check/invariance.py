"""Stage `invariance`: at 7B width a row's logits have the same bits whatever is verified with it.

Then greedy text is that of plain decoding, whatever the tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasteagle.bench.gpu_check.models import (
    compile_pieces,
    opened,
    replaying_engine,
    runtime,
    use_tree,
)
from fasteagle.bench.gpu_check.stage import Context, require
from fasteagle.decoding.cycle import EAGER, Proposal
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.shapes import TreeShape
from fasteagle.tree import DraftTree

BLOCKS = 4
ROWS = (1, 8, 16, 17, 32)
PROMPT = list(range(5, 69))
NEW_TOKENS = 96
FEW_TOKENS = 16  # on a dry run
TREES = (TreeShape(5, 1, 5), TreeShape(5, 4, 15), TreeShape(6, 5, 31))


def run(context: Context) -> None:
    for precision in ("int4", "int8"):
        with context.part(precision):
            options = runtime(context, precision, 512)
            prepared = opened(context, "llama2-7b", BLOCKS).prepared(options, lambda line: None)
            engine = replaying_engine(context, prepared)
            different = different_rows(engine)
            n = FEW_TOKENS if context.dry_run else NEW_TOKENS
            n_compiled = compile_pieces(context, engine)
            plain = answer(engine, n)
            texts = {}
            for tree in TREES:
                use_tree(engine, prepared, tree)
                n_compiled += compile_pieces(context, engine)
                texts[str(tree)] = answer(engine, n) == plain
            found = {"different_rows": different, "same_text": texts}
            context.save(**{precision: {**found, "compiled_pieces": n_compiled}})
            context.say(
                f"{precision}: bits differ at {different or 'no'} number of rows; "
                f"greedy text of plain decoding with {sum(texts.values())} of {len(texts)} trees"
            )
            if not context.dry_run:  # the products of a CPU here do not promise it
                require(not different, f"logits depend on the number of rows: {different}")
                require(all(texts.values()), f"greedy text depends on the tree: {texts}")


def answer(engine: Engine, n: int) -> list[int]:
    engine.restart()
    return [t for ids in engine.generate(PROMPT, SamplingParams(), n) for t in ids]


def different_rows(engine: Engine) -> list[int]:
    """Numbers of rows T at which the logits of a chain's first T rows differ from those of 32."""
    engine.use(None)
    most = max(ROWS)
    full = logits_of_a_chain(engine, most)
    return [T for T in ROWS if not torch.equal(logits_of_a_chain(engine, T), full[:T])]


@torch.no_grad()
def logits_of_a_chain(engine: Engine, T: int) -> Tensor:
    """Logits [T, V] of one pass over a chain of T tokens behind the prompt."""
    engine.restart()
    engine.prefill(PROMPT)
    tokens = torch.arange(7, 7 + T, device=engine.device)
    parents = torch.arange(-1, T - 1, device=engine.device).clamp(min=0)
    tree = DraftTree(tokens, parents, torch.ones_like(tokens).bool())
    engine.reserve(len(engine.cached), T)
    engine.state.seq_len.fill_(len(engine.cached))
    return EAGER.verify(engine.state, engine.model, Proposal.of(tree)).logits
