"""Drafters that only the benchmark has: lossless, and what they claim to be."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from fasteagle.bench.rivals.lookahead import GUESSES, LEVELS, NONE, WINDOW, LookaheadDrafter
from fasteagle.bench.rivals.medusa import (
    HEADS,
    MEDUSA_SHAPE,
    MedusaDrafter,
    MedusaHeads,
    likeliest_paths,
    load_medusa,
    save_medusa,
    targets_of,
)
from fasteagle.bench.rivals.train_medusa import measure_ranks, read_positions, train_medusa
from fasteagle.decoding.cycle import decode_cycle
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.sampling import SamplingMode
from fasteagle.tree import ancestor_mask
from helpers import (
    DRAWN,
    GREEDY,
    captured_engine,
    empty_state,
    generated,
    random_target,
    spec_of,
    tiny_config,
)
from training_cases import talk

EVEN = ((0.3, 0.2, 0.1, 0.05, 0.04, 0.03, 0.02, 0.01),) * HEADS


def random_heads(dim=32):
    torch.manual_seed(2)
    heads = MedusaHeads(dim)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


RIVALS = {
    "lookahead": lambda engine: LookaheadDrafter(60, "cpu"),
    "medusa": lambda engine: MedusaDrafter(random_heads(), EVEN, engine.model),
}


@pytest.mark.parametrize("make", RIVALS.values(), ids=RIVALS)
@pytest.mark.parametrize("params", DRAWN, ids=str)
def test_the_tokens_of_plain_decoding(target, make, params):
    expected = generated(Engine(target, 512), params=params)
    lengths = []
    for engine in (Engine(target, 512), captured_engine(target, 512)):
        engine.use(make(engine))
        assert generated(engine, params=params) == expected
        lengths.append(engine.stats.path_lengths)
    # Another text right after it.
    other = generated(Engine(target, 512), 20, [1, 2, 3], params)
    assert generated(engine, 20, [1, 2, 3], params) == other
    assert lengths[0] == lengths[1]


# Lookahead


@torch.no_grad()
def test_what_the_target_said_becomes_guesses(target):
    """A cycle by hand: the n-grams of the window's columns are found by their first token."""
    drafter, state = LookaheadDrafter(60, "cpu"), empty_state(target)
    text = list(range(3, 30))
    state.load(text, None, GREEDY)
    spec = spec_of(drafter.shape, 0)
    tree = drafter.propose(None, state, spec)
    assert int(tree.valid[1 : 1 + GUESSES * LEVELS].sum()) == 0  # nothing was collected yet
    window = drafter._window.clone()
    said = torch.arange(40, 40 + drafter.shape.rows)
    drafter._drawn.copy_(said)
    state.text[len(text) : len(text) + 2] = torch.tensor([50, int(window[0, 2])])
    state.seq_len.add_(2)  # one guess and the bonus token; the third column's is the root now
    state.root.copy_(window[0, 2:3])
    tree = drafter.propose(None, state, spec)
    gram = [*window[1:, 2].tolist(), int(said[-WINDOW + 2])]
    assert tree.tokens[1 : 1 + LEVELS].tolist() == gram
    # Two tokens on, the column after next is the first, one level up; the last one is repeated.
    moved = torch.cat((window[1:], said[-WINDOW:].unsqueeze(0)))
    columns = [min(i + 1, WINDOW - 1) for i in range(WINDOW)]
    assert torch.equal(drafter._window, moved[:, columns])


def test_of_many_guesses_the_oldest_goes_and_none_is_kept_twice():
    drafter = LookaheadDrafter(60, "cpu")
    wanted = torch.tensor([True])
    for n in (10, 10, 11, 12, 13, 14, 15):
        drafter._store(torch.tensor([7, n, n, n]), wanted)
    drafter._store(torch.tensor([7, 20, 20, 20]), ~wanted)
    drafter._store(torch.tensor([7, 21, NONE, 21]), wanted)
    assert drafter._pool[7, :, 0].tolist() == [15, 11, 12, 13, 14]
    assert (drafter._pool[8] == NONE).all()


def test_a_text_in_circles_is_guessed():
    """A target that repeats itself says n-grams that come true."""
    taus = []
    for seed in range(6):
        target = random_target(tiny_config(), seed)
        engine = Engine(target, 512, drafter=LookaheadDrafter(60, "cpu"))
        generated(engine, n=120)
        taus.append(engine.stats.tau)
    assert max(taus) > 1.5


@torch.no_grad()
def test_the_whole_cycle_is_one_graph(target):
    torch._dynamo.reset()
    drafter, states = LookaheadDrafter(60, "cpu"), [empty_state(target) for _ in range(2)]
    drafters = [drafter.apart() for _ in states]
    compiled = torch.compile(decode_cycle, fullgraph=True, backend="eager")
    for cycle, state, mine in zip((compiled, decode_cycle), states, drafters, strict=True):
        state.load([*range(1, 9)] * 3, None, GREEDY)
        spec = dataclasses.replace(spec_of(mine.shape, 0), accept=mine.accept_for(SamplingMode()))
        for _ in range(3):
            cycle(state, target, mine, spec)
    assert all(map(torch.equal, states[0].advanced, states[1].advanced))
    assert all(map(torch.equal, drafters[0].advanced, drafters[1].advanced))
    torch._dynamo.reset()


# Medusa


def test_each_head_is_asked_for_one_token_further_on():
    positions, ahead = targets_of(list(range(100, 110)), 3)
    # Position 2 ends the prompt: its feature chooses token 3, and the first head says token 4.
    assert positions.tolist() == [2, 3, 4]
    assert ahead.tolist() == [[104 + j, 105 + j, 106 + j] for j in range(HEADS)]
    assert len(targets_of([1, 2, 3], 1)[0]) == 0


@torch.no_grad()
def test_the_tree_holds_the_ranked_tokens_of_every_head(target):
    drafter, state = MedusaDrafter(random_heads(), EVEN, target), empty_state(target)
    feature = torch.randn(1, 32)
    tree = drafter.propose(feature, state, spec_of(MEDUSA_SHAPE))
    read = drafter.heads(feature)[:, 0]
    order = sorted(likeliest_paths(EVEN, MEDUSA_SHAPE.nodes), key=lambda path: (len(path), path))
    for row, path in enumerate(order, 1):
        best = target.lm_head(read[len(path) - 1]).topk(path[-1] + 1).indices
        assert int(tree.tokens[row]) == int(best[-1])
    _, depths = ancestor_mask(tree.parents, tree.valid)
    assert depths[1:].tolist() == [len(path) for path in order]


def test_trained_heads_are_accepted_and_kept(target, tmp_path, capsys):
    conversations = talk(target, n=40)
    options = dict(positions=600, epochs=30, lr=1e-2, batch=64)
    heads, ranks = train_medusa(Engine(target, 256), conversations, **options)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 30 and float(lines[-1].split()[-1]) < 0.7 * float(lines[0].split()[-1])
    # Better than heads that know nothing, on conversations that they were trained on.
    fresh = MedusaHeads(32)
    pairs = read_positions(Engine(target, 256), conversations[1:9], 200)
    rows = target.head_rows(torch.arange(60))
    trained, blank = (measure_ranks(h, *pairs, rows) for h in (heads, fresh))
    assert sum(row[0] for row in trained) > sum(row[0] for row in blank) + 0.3
    path = tmp_path / "medusa.safetensors"
    save_medusa(path, heads, ranks)
    loaded, same = load_medusa(path, 32)
    assert same == ranks and all(map(torch.equal, loaded.parameters(), heads.parameters()))
    with pytest.raises(FasteagleError, match="width 64"):
        load_medusa(path, 64)
    # And they are accepted where the target decodes.
    engine = Engine(target, 256, drafter=MedusaDrafter(loaded, same, target))
    prompt = conversations[1].ids[: conversations[1].prompt_len]
    assert generated(engine, 20, prompt) == conversations[1].ids[conversations[1].prompt_len :]
    assert engine.stats.tau > 1.5


def test_files_that_are_no_heads(tmp_path):
    (tmp_path / "text").write_bytes(b"no tensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "others")
    for name in ("missing", "text", "others"):
        with pytest.raises(FasteagleError, match="scripts/train_medusa.py"):
            load_medusa(tmp_path / name, 32)
