"""Prompts of many kinds, for the text that the default model's draft head is trained on.

    python scripts/head_prompts.py --seeds seeds.jsonl --count 9000 --out prompts.jsonl
    fasteagle generate-data --prompts prompts.jsonl --out text.jsonl

Templates and lists are in `head_prompts.ini`; they are filled with random numbers, Python's own
library (code and docstrings) and seed tasks (JSONL with `instruction`, `input`, `output`). Same
arguments and Python, same prompts.
"""

from __future__ import annotations

import ast
import configparser
import random
import re
import sysconfig
import textwrap
from pathlib import Path
from typing import Any

import click

from fasteagle.cli.command import Script
from fasteagle.cli.options import FILE, RESULT
from fasteagle.config_fields import parse_json
from fasteagle.errors import counted
from fasteagle.prompts import expecting, json_lines, write_questions

SECOND_TURNS = 0.35  # share of conversations
SEEDED = "seeded"  # kind that needs seed tasks
RECORD = "{name} bought {n(1, 40)} {goods} in {place} for ${n(2, 90)}."


class Maker:
    """Maker of random prompts."""

    def __init__(self, seeds: list[dict[str, str]], seed: int) -> None:
        self.random, self.seeds = random.Random(seed), seeds
        self.functions = library_functions()
        ini = configparser.ConfigParser(interpolation=None, delimiters=("=",))
        ini.read_string(Path(__file__).with_suffix(".ini").read_text("utf-8"))
        self.lists = {name: _entries(text, ";") for name, text in ini["lists"].items()}
        self.lists["topic"] = self.lists["science"] + self.lists["humanities"]
        about = ("place", "topic", "everyday", "thing")
        self.lists["subject"] = [entry for name in about for entry in self.lists[name]]
        self.numbers = {name: list(map(int, text.split())) for name, text in ini["numbers"].items()}
        kinds = {name: ini[name] for name in ini.sections() if "templates" in ini[name]}
        self.kinds = [kind for name, kind in kinds.items() if seeds or name != SEEDED]

    def turns(self) -> list[str]:
        """Return the turns of a new conversation."""
        (kind,) = self.random.choices(self.kinds, [kind.getfloat("weight") for kind in self.kinds])
        template = self.random.choice(_entries(kind["templates"], "\n"))
        turns = [self.filled(template.replace(r"\n", "\n"))]
        if self.random.random() < SECOND_TURNS:
            turns.append(self.random.choice(self.lists[kind.get("follow", "follow")]))
        return turns

    def filled(self, template: str) -> str:
        """Return `template` with values in place of what stands in braces."""
        fields = Fields(self)
        return re.sub(r"\{(.+?)\}", lambda field: str(eval(field[1], {}, fields)), template)

    def records(self) -> str:
        """Return some purchases, side by side or one a line."""
        rows = [self.filled(RECORD) for _ in range(self.random.randint(2, 6))]
        return self.random.choice(["\n", " "]).join(rows)

    def passage(self) -> str:
        """Return the output of a seed task, or a docstring."""
        if self.seeds and self.random.random() < 0.5:
            return self.random.choice(self.seeds)["output"][:700]
        return " ".join(self.random.choice(self.functions)["docstring"].split())

    def task(self) -> str:
        task = self.random.choice(self.seeds)
        return f"{task['instruction']}\n{task['input']}".strip()


class Fields(dict[str, Any]):
    """Values of a prompt's fields: each is drawn when first read, and is the same from then on."""

    def __init__(self, maker: Maker) -> None:
        super().__init__(n=maker.random.randint)
        self._maker = maker
        self._function = maker.random.choice(maker.functions)

    def __missing__(self, name: str) -> Any:
        maker = self._maker
        if name in maker.numbers:
            self[name] = maker.random.randint(*maker.numbers[name])
        elif name in self._function:
            self[name] = self._function[name]
        elif name in ("records", "passage", "task"):
            self[name] = getattr(maker, name)()
        else:
            entries = maker.lists[name.rstrip("23")]
            self[name] = maker.random.choice([e for e in entries if e not in self.values()])
        return self[name]


def _entries(text: str, separator: str) -> list[str]:
    return [part.strip().replace("\n", " ") for part in text.split(separator) if part.strip()]


def library_functions() -> list[dict[str, str]]:
    """Return signature, docstring and source of functions of Python's library, of readable size."""
    functions = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)):
            doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            code = ast.get_source_segment(source, node) if doc else None
            if doc is None or code is None or not 40 <= len(doc) <= 500 or len(code) > 1200:
                continue
            assert isinstance(node, ast.FunctionDef)
            arguments = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
            functions.append(
                {
                    "signature": f"def {node.name}({', '.join(arguments)}):",
                    "docstring": textwrap.indent(doc, "    ").strip(),
                    "source": textwrap.dedent(code),
                }
            )
    return functions


def _seed_task(line: str, where: str) -> dict[str, str]:
    with expecting('{"instruction": "text", "input": "text", "output": "text"}', where):
        task = parse_json(line)
        if not all(type(task[key]) is str for key in ("instruction", "input", "output")):
            raise ValueError("all three must be texts")
    return {str(key): task[key] for key in ("instruction", "input", "output")}


@click.command(cls=Script, help=__doc__)
@click.option("--seeds", type=FILE)
@click.option(
    "--count",
    type=click.IntRange(1),
    default=9000,
    show_default=True,
    help="Conversations, all different.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--out", required=True, type=RESULT)
def main(seeds: Path | None, count: int, seed: int, out: Path) -> None:
    tasks = json_lines(seeds) if seeds else ()
    maker = Maker([_seed_task(*task) for task in tasks], seed)
    conversations: dict[str, list[str]] = {}
    for _ in range(20 * count):
        if len(conversations) == count:
            break
        turns = maker.turns()
        conversations.setdefault(turns[0], turns)
    write_questions(out, conversations.values())
    click.echo(f"{counted(len(conversations), 'conversation')} in {out}", err=True)


if __name__ == "__main__":
    main()
