"""Chat at a terminal: read lines, run slash commands, print answers as they come."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from fasteagle.answering.keywords import check_text, listed
from fasteagle.cli.markdown import AnswerScreen, Style
from fasteagle.cli.session import ChatSession, Piece, format_stats
from fasteagle.config_fields import parse_json_file
from fasteagle.drafting.draft_model import ModelDrafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.errors import FasteagleError, counted, note, reason_of, shown, suggest, within
from fasteagle.options import AnswerOptions, SamplingParams
from fasteagle.paths import require_writable, state_dir, write_atomic

PROMPT = ">>> "
CONTINUATION = "... "
HISTORY_LENGTH = 1000

ALIASES = {
    **dict.fromkeys(("/?", "/h"), "/help"),
    **dict.fromkeys(("/clear", "/c"), "/reset"),
    **dict.fromkeys(("/regen", "/r"), "/retry"),
    **dict.fromkeys(("/bye", "/quit", "/q"), "/exit"),
    "/metrics": "/stats",
    "/sp": "/system",
}

THINK = {"on": True, "off": False, "default": None}

HELP = """\
/help             this list                       (also /?)
/stats            the last answer in numbers      (also /metrics)
/reset            forget the conversation         (also /clear)
/retry            answer again, with the next seed (also /regen)
/system [TEXT]    show or set the system prompt, and start anew
/set K=V[;K=V]    temperature, top_k, top_p, min_p, repetition_penalty, seed,
                  max_new_tokens, stop (commas between stop strings), think
                  (on, off or default)
/show             the options in force
/spec on|off|N    guess ahead, do not, or verify N guesses a pass
/tint [on|off]    colour what was guessed right, or do not
/save FILE        write the conversation          /load FILE  read it back
/exit             leave                           (also /bye, /quit, Ctrl-D)
\"\"\"               begins and ends a text of several lines
Ctrl-C            stops an answer and keeps what came"""


class Repl:
    """Chat loop until /exit or end of input; `plain` shows answers without rendering."""

    def __init__(self, session: ChatSession, style: Style, quiet: bool, plain: bool) -> None:
        self.session, self.style = session, style
        self.engine = session.llm.engine
        self.drafter = self.engine.drafter
        self.quiet, self.plain = quiet, plain

    def run(self) -> None:
        save_history = _open_history()
        try:
            while True:
                try:
                    line = self._read()
                except EOFError:
                    print()
                    return
                except KeyboardInterrupt:
                    print("\nCtrl-D or /exit to leave")
                    continue
                except UnicodeDecodeError as error:
                    note(f"that line is not UTF-8 ({error.reason}): not sent")
                    continue
                try:
                    if line.strip() and self._handle(line):
                        return
                except KeyboardInterrupt:
                    print("\n[stopped]")
        finally:
            save_history()

    def _read(self) -> str:
        line = input(PROMPT)
        if not line.lstrip().startswith('"""'):
            return line
        text = line.lstrip()[3:]
        while not text.rstrip().endswith('"""'):
            text += "\n" + input(CONTINUATION)
        return text.rstrip()[:-3]

    def _handle(self, line: str) -> bool:
        """Act on one line and return True to leave; print mistakes and keep the conversation."""
        try:
            if line.startswith("/") and "\n" not in line:
                return self._command(line.strip())
            self._print(self.session.ask(line))
        except FasteagleError as error:
            note(f"Error: {error}")
        return False

    def _print(self, pieces: Generator[Piece]) -> None:
        """Print an answer as it comes; Ctrl-C ends it and keeps the part that came."""
        answer, before, stopped = AnswerScreen(self.plain), self.session.turns[-1:], False
        try:
            for piece in pieces:
                answer.write(self.style.text_of(piece))
            answer.finish()
        except KeyboardInterrupt:
            stopped = True
        finally:
            pieces.close()
        if stopped:
            last = self.session.turns[-1:]
            is_new = bool(last) and not (before and last[0] is before[0])
            part = "the part above stays in the conversation"
            print(f"\n[stopped; {part if is_new else 'nothing came yet'}]")
        if not self.quiet and self.session.stats.new_tokens:
            note(format_stats(self.session.stats))

    def _command(self, line: str) -> bool:
        name, _, argument = line.partition(" ")
        name = ALIASES.get(name, name)
        actions: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/stats": self._stats,
            "/reset": self._reset,
            "/retry": lambda _: self._print(self.session.retry()),
            "/system": self._system,
            "/set": self._set,
            "/show": self._show,
            "/spec": self._spec,
            "/tint": self._tint,
            "/save": self._save,
            "/load": self._load,
        }
        if name == "/exit":
            return True
        if name not in actions:
            similar = suggest(name, [*actions, "/exit", *ALIASES])
            raise FasteagleError(f"no command {name!r}{similar or ':'} /help lists them")
        actions[name](argument.strip())
        return False

    def _stats(self, _: str) -> None:
        stats = self.session.stats
        if not stats.new_tokens:
            raise FasteagleError("no answer yet: ask something first")
        print(format_stats(stats))
        print(
            f"passes {stats.passes:,} | finish {stats.finish or 'stopped'} | context "
            f"{len(self.engine.cached):,} of {self.engine.max_seq_len:,}"
        )
        print(self.engine.backend.describe())
        drafter = self.engine.drafter
        if drafter is not None and drafter.policy is not None:
            print(drafter.policy.explain())
        by_depth = enumerate(stats.acceptance_by_depth, 1)
        rates = " ".join(f"{depth}: {100 * rate:.0f} %" for depth, rate in by_depth)
        if rates:
            print(f"accepted to depth {rates}")

    def _spec(self, text: str) -> None:
        if text == "off":
            self.session.llm.use(None)
        elif text == "on":
            self.session.llm.use(self.drafter)
        elif text:
            self._resize(text)
        drafter = self.engine.drafter
        print(f"{drafter.name}, {drafter.shape.size}" if drafter else "no speculation")

    def _resize(self, number: str) -> None:
        """Draft so many tokens a pass from now on."""
        if not (number.isascii() and number.isdigit()):
            raise FasteagleError(f"/spec wants on, off or a number of nodes, got {number[:40]!r}")
        if len(number) > 4:
            raise FasteagleError(f"/spec {number[:40]} is out of range: use fewer than 10,000")
        if not isinstance(self.drafter, EagleDrafter | ModelDrafter):
            raise FasteagleError("/spec N needs a draft head or a draft model")
        with within(f"/spec {number} is out of range"):
            self.session.llm.use(self.drafter.resized(int(number)))

    def _tint(self, text: str) -> None:
        if text not in ("", "on", "off"):
            raise FasteagleError(f"/tint wants on or off, got {text!r}")
        self.style.tints = not self.style.tints if not text else text == "on"
        print(f"guesses that were right are {'tinted' if self.style.tints else 'not tinted'}")

    def _reset(self, _: str) -> None:
        self.session.turns = []
        print("conversation forgotten")

    def _system(self, text: str) -> None:
        if not text:
            print(self.session.system or "(the model's own default)")
            return
        self.session.system = text
        self._reset("")

    def _set(self, text: str) -> None:
        params, answer, think = self.session.params, self.session.answer, self.session.think
        for item in text.split(";") if text else ():
            key, separator, value = (part.strip() for part in item.partition("="))
            if not item.strip():
                continue
            if not separator:
                raise FasteagleError(f"/set wants key=value, got {item.strip()!r}")
            key = key.replace("-", "_")
            if key in vars(params):
                params = _with_value(params, key, value)
            elif key in vars(answer):
                answer = _with_value(answer, key, value)
            elif key == "think":
                think = self._think(value)
            else:
                known = [*vars(params), *vars(answer), "think"]
                raise FasteagleError(f"/set knows no {key!r}: {', '.join(known)}")
        self.session.params, self.session.answer, self.session.think = params, answer, think
        if not text:
            self._show("")

    def _think(self, word: str) -> bool | None:
        if word not in THINK:
            raise FasteagleError(f"/set think: {word!r} is unknown: use {', '.join(THINK)}")
        think = THINK[word]
        if think is not None:
            self.session.llm.tokenizer.check_think(think)
        return think

    def _show(self, _: str) -> None:
        for key, value in (vars(self.session.params) | vars(self.session.answer)).items():
            print(f"{key} = {','.join(value) if isinstance(value, tuple) else value}")
        print("think =", next(word for word, v in THINK.items() if v is self.session.think))

    def _save(self, name: str) -> None:
        path = _file_argument(name, "/save")
        require_writable(path)
        content = {
            "system": self.session.system,
            "turns": self.session.turns,
            "params": dataclasses.asdict(self.session.params),
            "answer": dataclasses.asdict(self.session.answer),
            "think": self.session.think,
        }
        try:
            write_atomic(path, json.dumps(content, ensure_ascii=False, indent=1).encode())
        except OSError as error:
            raise FasteagleError(f"cannot write {path}: {error.strerror}") from error
        print(f"saved {counted(len(self.session.turns), 'message')} to {path}")

    def _load(self, name: str) -> None:
        path = _file_argument(name, "/load")
        try:
            content = _object("the file", parse_json_file(path))
            messages = [_object("a turn", turn) for turn in listed("turns", content["turns"])]
            turns = [{"role": turn["role"], "content": turn["content"]} for turn in messages]
            params = SamplingParams(**_object("params", content["params"]))
            answer = AnswerOptions(**_object("answer", content["answer"]))
            think, system = content.get("think"), content.get("system")
            roles = ["user", "assistant"] * len(turns)
            if any(t["role"] != role for t, role in zip(turns, roles, strict=False)):
                raise ValueError("turns do not alternate between user and assistant")
            for turn in turns:
                check_text("content", turn["content"])
            if system is not None:
                check_text("system", system)
            if not isinstance(think, bool | None):
                raise ValueError(f"think is {think!r}")
        except OSError as error:
            raise FasteagleError(f"cannot read {path}: {error.strerror}") from error
        except (KeyError, TypeError, ValueError, FasteagleError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else reason_of(error)
            raise FasteagleError(f"{path} is no saved conversation: {reason}") from error
        session = self.session
        session.system, session.turns = system, list(turns)
        session.params, session.answer = params, answer
        # A conversation goes on with another model too, one without the switch included.
        session.think = think if session.llm.tokenizer.has_thinking_switch else None
        print(f"loaded {counted(len(turns), 'message')} from {path}")


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no JSON object: {shown(value)}")
    return value


def _file_argument(name: str, command: str) -> Path:
    if not name:
        raise FasteagleError(f"{command} wants a file name")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~nobody-we-know/x
        raise FasteagleError(f"{name}: {error}") from error


def _with_value(options: Any, key: str, value: str) -> Any:
    """Return `options` with field `key` read from the text `value`, checked by the dataclass."""
    kind = {field.name: str(field.type) for field in dataclasses.fields(options)}[key]
    new: Any
    try:
        if kind in ("float", "int"):
            new = float(value) if kind == "float" else int(value)
        else:
            new = tuple(s for s in value.split(",") if s)
    except ValueError:
        raise FasteagleError(f"/set {key}: {shown(value)} is not a number ({kind})") from None
    return dataclasses.replace(options, **{key: new})


def _open_history() -> Callable[[], None]:
    """Load the line history where readline exists, and return the function that saves it."""
    try:
        import readline
    except ImportError:  # Windows, or a Python built without it
        return lambda: None
    path = state_dir() / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            readline.read_history_file(path)
    except OSError as error:
        note(f"history not kept: {error}")
        return lambda: None
    readline.set_history_length(HISTORY_LENGTH)

    def save() -> None:
        try:
            readline.write_history_file(path)
        except OSError as error:
            note(f"history not saved: {error}")

    return save
