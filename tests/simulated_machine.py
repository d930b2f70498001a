"""Machine whose times are known: it runs the cycles that a policy chooses."""

from __future__ import annotations

import random

from fasteagle.drafting.company import Company
from fasteagle.drafting.costs import Costs
from fasteagle.drafting.ladder import DEFAULT_RANKS, expected_of_head
from fasteagle.drafting.policy import Outcome, Policy
from fasteagle.shapes import AnyShape, GatedChain

CHAIN = GatedChain(8)
# Rows of a target pass and levels of a chain, in ms: a CPU whose memory is slow, and a quiet one.
SLOW = Costs(
    {1: 4.9, 2: 5.1, 4: 5.8, 8: 7.8, 16: 12.0, 32: 22.0}, {}, {}, 0.1, 0.05, 0.01, {1: 0.5, 8: 2.6}
)
QUIET = Costs(
    {1: 2.5, 2: 3.1, 4: 4.5, 8: 8.0, 16: 14.6, 32: 29.0}, {}, {}, 0.1, 0.05, 0.01, {1: 0.5, 8: 2.6}
)
# A card: rows are cheap, and drafting is one small kernel after another.
LEVELS = [dict.fromkeys((1, 2, 4, 8), ms) for ms in (0.4, 0.3)]
CARD = Costs({1: 6.5, 2: 6.6, 4: 6.7, 8: 6.9, 16: 7.4, 32: 8.9}, *LEVELS, 0.1, 0.05)


class Machine:
    """Runs the cycles that a policy chooses, and counts tokens and milliseconds.

    A draft head's token is right with probability `p` where the one before it is, and says so;
    `boast` is what it says over what is true.
    """

    def __init__(self, true: Costs, p: float, seed: int = 0, boast: float = 1.0) -> None:
        self.true, self.p, self.boast = true, p, boast
        self.random = random.Random(seed)
        self.tokens, self.ms, self.drafted = 0, 0.0, 0

    def run(self, policy: Policy, tokens: int) -> float:
        """Decode so many tokens; return tokens per ms over plain decoding's."""
        self.tokens, self.ms = 0, 0.0
        while self.tokens < tokens:
            shape = policy.next_shape
            outcome = self.plain() if shape is None else self.cycle(policy, shape)
            policy.learn(shape, outcome)
            self.tokens += 1 + outcome.accepted
            assert outcome.ms is not None
            self.ms += outcome.ms
        return self.tokens / self.ms * self.true.plain

    def noisy(self, ms: float) -> float:
        return ms * self.random.uniform(0.95, 1.05) * (10 if self.random.random() < 0.002 else 1)

    def begin_pass(self, drafted: bool) -> None:
        """Note whether anything was drafted for the pass that follows."""

    def plain(self) -> Outcome:
        self.drafted = 0
        self.begin_pass(False)
        return Outcome(ms=self.noisy(self.true.plain), verify_ms=self.noisy(self.true.passes[1]))

    def accepted(self, n: int) -> int:
        for depth in range(n):
            if self.random.random() >= self.p:
                return depth
        return n

    def cycle(self, policy: Policy, shape: AnyShape) -> Outcome:
        if isinstance(shape, GatedChain):
            return self.chain(policy)
        return self.tree(shape)._replace(ms=self.noisy(self.true.cycle(shape)))

    def tree(self, shape: AnyShape) -> Outcome:
        ranks = tuple((self.p, 0.1) for _ in range(6))
        mean = expected_of_head(shape, ranks, 1.0)
        return Outcome(min(shape.depth, int(mean + self.random.random())), 0, shape.nodes, True)

    def drafted_chain(self, policy: Policy | Company) -> tuple[list[float], int]:
        """Path probabilities of a chain that the policy's thresholds end, and its levels."""
        bounds, paths, path, levels = policy.thresholds, [], 1.0, 0
        for depth in range(8):
            levels += 1
            # Sure of some tokens and not of others; on average p.
            said = min(1.0, self.p + self.random.uniform(-0.3, 0.3))
            path *= min(1.0, said * self.boast)
            if path < bounds.verify[depth]:
                break
            paths.append(path)
            if path < bounds.expand[depth]:
                break
        return paths, levels

    def chain(self, policy: Policy) -> Outcome:
        self.begin_pass(True)
        paths, levels = self.drafted_chain(policy)
        n = len(paths)
        draft = self.noisy(self.true.draft(GatedChain(levels)))
        verify = self.noisy(self.true.verify(1 + n))
        ms = draft + verify + self.true.other
        return Outcome(self.accepted(n), 0, n, True, paths, ms, draft, verify)

    def run_together(
        self, company: Company, n: int, tokens: int, looking_ms: float = 0.0, n_plain: int = 0
    ) -> float:
        """Decode so many tokens of `n` sequences; return tokens per ms over plain decoding's.

        Looking up, which finds nothing, takes `looking_ms` for each that may draft. The first
        `n_plain` sequences may not.
        """
        written, spent, drafted = 0, 0.0, 0
        while written < tokens:
            rows, ms, before = n, self.true.other + self.shared_draft(company, n), drafted
            for i in range(n):
                outcome, shape = Outcome(), None if i < n_plain else company.next_shape
                ms += looking_ms if shape is not None else 0.0
                if shape is not None and not isinstance(shape, GatedChain):
                    own = 0.0 if company.drafts_together else self.noisy(self.true.draft(shape))
                    ms, drafted = ms + own, drafted + 1
                    outcome = self.tree(shape)
                elif shape is not None and company.head_gain is not None:
                    paths, levels = self.drafted_chain(company)
                    draft = self.noisy(self.true.draft(GatedChain(levels)))
                    k, ms, drafted = len(paths), ms + draft, drafted + 1
                    outcome = Outcome(self.accepted(k), 0, k, True, paths, draft_ms=draft)
                company.learn(shape, outcome)
                rows, written = rows + outcome.drafted, written + 1 + outcome.accepted
            self.begin_pass(drafted > before)
            ms += self.noisy(sum(map(self.true.verify, passes_of(rows))))
            company.end_passes(1, ms)
            spent += ms
        self.drafted = drafted
        return written / spent / (n / (self.true.verify(n) + self.true.other))

    def shared_draft(self, company: Company, n: int) -> float:
        """Milliseconds of a run of the draft head for all of `n` sequences, if there is one."""
        shape = company.next_shape
        if not company.drafts_together or shape is None:
            return 0.0
        more = self.true.verify(n * shape.topk) / self.true.verify(shape.topk)
        return self.noisy(self.true.draft(shape) * more)


class SharedCache(Machine):
    """Machine with a shared cache: drafting pushes the weights out of it.

    A pass then takes up to `cold` times as long. Dozens of plain passes bring the weights back.
    """

    def __init__(self, true: Costs, p: float, cold: float, seed: int = 0) -> None:
        super().__init__(true, p, seed)
        self.cold, self.cached = cold, 1.0  # share of the weights in the cache

    def noisy(self, ms: float) -> float:
        return super().noisy(ms) * (self.cold - (self.cold - 1) * self.cached)

    def begin_pass(self, drafted: bool) -> None:
        self.cached += -0.08 * self.cached if drafted else (1 - self.cached) / 25


def passes_of(rows: int) -> list[int]:
    """Rows of the passes that so many rows take."""
    return [32] * (rows // 32) + [rows % 32] * (rows % 32 > 0)


def policy_of(table: Costs, *shapes: AnyShape, head: bool = True, lookup: bool = False) -> Policy:
    return Policy(table, DEFAULT_RANKS, shapes or (CHAIN,), head=head, lookup=lookup)
