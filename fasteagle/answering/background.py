"""Background preparation of a conversation: compiled code, and the tuner's costs.

Compilation runs all the time, measuring only while no answer is under way. An answer that begins
before either is ready runs without it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from fasteagle.compile.blocks import BlockCompiler, configure, start_compiler
from fasteagle.compile.costs import costs_of, follow_costs, tunable
from fasteagle.compile.cycles import CycleCompiler
from fasteagle.drafting.base import Drafter
from fasteagle.errors import first_line, note
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import AnyShape


class _OtherDrafterError(Exception):
    """Raised where the drafter that is measured is not in use any more."""


class Preparation:
    """Preparation in threads of its own, which begin at once.

    Only one thread runs the engine at a time: an answer for its whole duration (`answering`), or
    one measurement. Between two answers the engine receives what has become ready.
    """

    def __init__(
        self, engine: Engine, quiet: bool, tune: bool = True, params: SamplingParams | None = None
    ) -> None:
        self._engine, self._quiet = engine, quiet
        self._running = threading.Lock()  # held by the thread that runs the engine
        self._params = params or SamplingParams()
        self._begun = {self._wanted(self._params)}  # what is compiled, or will be
        self._compiler: BlockCompiler = start_compiler(engine, self._params)
        self._reported = False  # whether the user was told how compilation ended
        self._warned: str | None = None  # why captures failed, as the user was told last
        self._news: list[str] = []  # for the user, once no line is being typed
        self._told: set[str] = set()  # what was said of stored costs, which are read once more
        self._drafter = tunable(engine) if tune else None
        self._interrupted = False  # whether measuring ended because another drafter was in use
        self._threads: list[threading.Thread] = []
        self._start(self._prepare)

    def wait_for_compiler(self, say: Callable[[str], None]) -> None:
        """Wait until the code is compiled; print a line by `say` where that takes time."""
        self._compiler.wait(say)

    def join(self) -> None:
        """Wait until everything is prepared."""
        for thread in list(self._threads):
            thread.join()

    @property
    def busy(self) -> bool:
        """Return whether something is still being compiled or measured."""
        return not self._compiler.done or any(thread.is_alive() for thread in self._threads)

    def use(self, drafter: Drafter | None) -> None:
        """Let the engine draft by `drafter`; continue a measurement of it that was interrupted."""
        with self._running:
            self._engine.use(drafter)
            self._begun.clear()  # compiled code of another drafter is dropped
            again = self._interrupted and drafter is self._drafter
            self._interrupted = self._interrupted and not again
        if again:
            self._start(self._prepare)

    @contextlib.contextmanager
    def _measuring(self) -> Iterator[None]:
        """Hold the engine for a measurement of the drafter."""
        with self._running:
            if self._engine.drafter is not self._drafter:
                self._interrupted = True
                raise _OtherDrafterError
            yield

    @contextlib.contextmanager
    def answering(self, params: SamplingParams) -> Iterator[None]:
        """Hold the engine for an answer, with the code that is ready; print news about it."""
        with self._running:
            for line in self._news:
                self._note(line)
            self._news.clear()
            error = self._engine.runner.error
            if error and error != self._warned:
                self._warned = error
                note(f"warning: running without CUDA graphs: {error}")
            if not self._reported:
                self._report(self._compiler.apply())
            self._compile_other(params)
            yield

    def _report(self, applied: bool) -> None:
        self._reported = applied or self._compiler.error is not None
        if self._compiler.error:
            note(f"warning: running without compilation: {self._compiler.error}")
        elif not applied:
            self._note("[still compiling: this answer runs without]")

    def _tell_once(self, line: str) -> None:
        """Add a line to the news, unless it was there before."""
        if line not in self._told:
            self._told.add(line)
            self._news.append(line)

    def _note(self, line: str) -> None:
        if not self._quiet:
            note(line)

    def _kind(self, params: SamplingParams) -> SamplingMode:
        return SamplingMode.of(params, self._engine.model.config.vocab_size)

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            configure()
            work()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def _wanted(self, params: SamplingParams) -> tuple[SamplingMode, tuple[AnyShape, ...]]:
        """Return of what an answer's code depends: sampling mode, trees that may be chosen."""
        drafter = self._engine.drafter
        return self._kind(params), () if drafter is None else tuple(drafter.shapes())

    def _compile_other(self, params: SamplingParams) -> None:
        """Compile for another sampling mode, drafter or trees, which run eagerly until then."""
        wanted = self._wanted(params)
        if not self._compiler.ready or wanted in self._begun:
            return
        self._begun.add(wanted)
        compiler = CycleCompiler(self._engine, wanted[0])
        if not compiler.missing:
            return

        def work() -> None:
            with self._reporting("compiled for these options"):
                compiler.compile()
                with self._running:
                    compiler.apply()

        self._start(work)

    def _prepare(self) -> None:
        """Apply compiled code, then stored or newly measured costs, which hold only for it."""
        self._compiler.wait()
        if self._compiler.error:
            return
        engine, drafter = self._engine, self._drafter
        with self._reporting("tuned"):
            with self._running:
                self._compiler.apply()
            if drafter is None:
                return
            costs, seconds = costs_of(
                engine,
                drafter,
                self._tell_once,
                self._kind(self._params),
                gate=self._measuring,
                compiled=True,
            )
            if seconds:
                self._news.append(f"[tuned in {seconds:.1f} s; /stats shows the tree]")
            with self._running:
                follow_costs(drafter, costs)
                if engine.drafter is drafter:  # not switched off in the meantime
                    engine.prepare(self._params)

    @contextlib.contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Report an error instead of raising it, so that answers continue."""
        try:
            yield
        except _OtherDrafterError:
            pass
        except Exception as error:
            reason = first_line(error, 200)
            self._news.append(f"warning: not {what}: {reason}")
