"""What a conversation prepares while it waits for the person: compiled code, and the tuner's costs.

Compilation goes on all the time, measuring only while nobody waits for an answer. An answer that
begins before either is ready does without.
"""

from __future__ import annotations

import threading

import torch

from fasteagle.compile import BlockCompiler
from fasteagle.compile.costs import costs_of, follow_costs, tunable
from fasteagle.compile.cycles import use_static_cycles
from fasteagle.errors import note
from fasteagle.generate import Engine, choose_plain_rows
from fasteagle.loading.open import start_compiler


class Preparation:
    """Begins at once, in threads of its own.

    `before_answer` makes the engine use what is ready, and `after_answer` lets measuring go on;
    between the two it pauses.
    """

    def __init__(self, engine: Engine, quiet: bool, tune: bool = True) -> None:
        self._engine, self._quiet = engine, quiet
        self._idle = threading.Event()
        self._idle.set()
        self._compiler: BlockCompiler = start_compiler(engine)
        self._said = False  # whether compilation's end was spoken of
        self._warned = False  # that capture failed
        self._news: list[str] = []  # for the person, once no line is being typed
        self._drafter = tunable(engine) if tune else None
        if self._drafter is not None:
            threads = torch.get_num_threads()
            threading.Thread(target=self._tune, args=(threads,), daemon=True).start()

    def wait_for_compiler(self) -> None:
        self._compiler.wait()

    def before_answer(self) -> None:
        """Use what is ready; a line where something is not, or has just become so."""
        self._idle.clear()
        for line in self._news:
            self._note(line)
        self._news.clear()
        captured = self._engine.captured
        if captured is not None and captured.error and not self._warned:
            self._warned = True
            note(f"warning: running without CUDA graphs: {captured.error}")
        if self._said:
            return
        applied = self._compiler.apply()
        self._said = applied or self._compiler.error is not None
        if applied and self._drafter is None:
            self._engine.plain_rows = choose_plain_rows(self._engine)
        if self._compiler.error:
            note(f"warning: running without compilation: {self._compiler.error}")
        elif not applied:
            self._note("[still compiling: this answer runs without]")

    def after_answer(self) -> None:
        self._idle.set()

    def _note(self, line: str) -> None:
        if not self._quiet:
            note(line)

    def _tune(self, threads: int) -> None:
        """Kept costs, or new ones; without compiled code neither is right."""
        torch.set_num_threads(threads)
        engine, drafter = self._engine, self._drafter
        assert drafter is not None, "started only for such"
        self._compiler.wait()
        if self._compiler.error:
            return
        try:
            self._idle.wait()
            self._compiler.apply()
            costs, seconds = costs_of(engine, drafter, self._news.append, gate=self._pause)
            if seconds:
                self._news.append(f"[tuned in {seconds:.1f} s; /stats shows the tree]")
            self._idle.wait()
            follow_costs(engine, drafter, costs)
            if engine.drafter is drafter:  # not switched off meanwhile
                use_static_cycles(engine)
        except Exception as error:  # whatever it is: the tree stays as it was, and answers go on
            reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            self._news.append(f"warning: not tuned: {reason}")

    def _pause(self) -> None:
        self._idle.wait()
