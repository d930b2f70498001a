"""Prompts of many kinds, for the text that the default model's draft head is trained on.

    python scripts/head_prompts.py --seeds seeds.jsonl --count 9000 --out prompts.jsonl
    fasteagle generate-data --prompts prompts.jsonl --out text.jsonl

Templates over lists of subjects, random numbers, Python's own library (code and docstrings) and
seed tasks (JSONL with `instruction`, `input`, `output`). Same arguments and Python, same prompts.
"""

from __future__ import annotations

import ast
import configparser
import json
import random
import sysconfig
import textwrap
from collections.abc import Callable
from pathlib import Path

import click

from fasteagle.prompts import json_lines

Turns = list[str]


def words(text: str) -> list[str]:
    return [part.strip().replace("\n", " ") for part in text.split(";") if part.strip()]


def read_lists() -> list[str]:
    """Return the lists of `head_prompts.ini`, in its order."""
    ini = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    ini.read_string(Path(__file__).with_suffix(".ini").read_text("utf-8"))
    return list(ini["lists"].values())


PLACES, SCIENCE, HUMANITIES, EVERYDAY, THINGS, PEOPLE, *OTHERS = read_lists()
NAMES, GOODS, CHORES, LANGUAGES, FOLLOW_UPS, CODE_FOLLOW_UPS = OTHERS


class Maker:
    """Maker of random prompts; `KINDS` are its methods with their weights."""

    def __init__(self, seeds: list[dict[str, str]], seed: int) -> None:
        self.random = random.Random(seed)
        self.seeds = seeds
        self.functions = library_functions()
        lists = (PLACES, SCIENCE, HUMANITIES, EVERYDAY, THINGS)
        self.subjects = [subject for text in lists for subject in words(text)]

    def one(self, text: str) -> str:
        return self.random.choice(words(text))

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def subject(self) -> str:
        return self.random.choice(self.subjects)

    def writing(self) -> Turns:
        kind = self.one(
            "a blog post;a short story;a poem;a formal email;a product review;a persuasive essay;"
            "a speech;an advertisement;a letter to a friend;an outline for an article;a limerick;"
            "a news report;a diary entry;a script for a short video;an apology;an invitation;"
            "a social media post;a fairy tale;a song;a press release;a scene for a play"
        )
        limit = self.one(
            "Keep it under 150 words.;Use a friendly tone.;Start with a question.;Be concise.;"
            "Use vivid language.;Write three paragraphs.;Do not use the letter z.;Add a title.;"
            "End with a call to action.;Write for teenagers.;Use no more than ten sentences."
        )
        verb = self.one("Write;Compose;Draft;Create;Please write;Can you write;Help me write")
        return [f"{verb} {kind} about {self.subject()}. {limit}"]

    def role(self) -> Turns:
        who = self.one(PEOPLE)
        return [
            self.random.choice(
                [
                    f"Pretend to be {who}. Tell me what you think of {self.subject()}.",
                    f"You are {who}. Answer in character: how was your day?",
                    f"Act as {who} and explain {self.one(SCIENCE)} to me.",
                    f"Imagine you are {who}. Introduce yourself to a group of children.",
                    f"I want you to play {who}. I ask you for advice about {self.one(EVERYDAY)}.",
                    f"Write a conversation between {who} and {self.one(PEOPLE)} "
                    f"about {self.subject()}.",
                ]
            )
        ]

    def explaining(self) -> Turns:
        a, b = self.random.sample(words(SCIENCE) + words(HUMANITIES), 2)
        return [
            self.random.choice(
                [
                    f"Explain {a} in simple terms.",
                    f"What is {a} and why does it matter?",
                    f"What are the main causes and effects of {a}?",
                    f"How are {a} and {b} related?",
                    f"Describe {a} step by step.",
                    f"What are common misconceptions about {a}?",
                    f"Give me five facts about {a}.",
                    f"How would you teach {a} in one lesson? Include an experiment or an activity.",
                    f"Write a quiz with three questions about {a}, with answers.",
                    f"What do experts disagree on when it comes to {a}?",
                    f"Discuss {a}. What are its consequences for everyday life today?",
                ]
            )
        ]

    def advice(self) -> Turns:
        a = self.one(EVERYDAY)
        return [
            self.random.choice(
                [
                    f"What are the pros and cons of {a}?",
                    f"Give me tips for {a}.",
                    f"Make a plan for {a} over {self.number(2, 8)} weeks.",
                    f"I am new to {a}. Where do I begin?",
                    f"What are the most common mistakes with {a}?",
                    f"Suggest {self.number(3, 10)} names for a podcast about {a}.",
                    f"Write a checklist for {a}.",
                    f"How much does {a} cost, and how can I pay less?",
                    f"Plan a {self.number(2, 7)}-day trip to {self.one(PLACES)}.",
                    f"What should I know before visiting {self.one(PLACES)}?",
                    f"My friend {self.one(NAMES)} worries about {a}. What should I say?",
                    f"Which is better for me, {self.one(THINGS)} or {self.one(THINGS)}?",
                ]
            )
        ]

    def sums(self) -> Turns:
        n = self.number
        a, b, c, d = n(2, 60), n(2, 30), n(2, 12), n(1, 9)
        x, y = self.random.sample(words(NAMES), 2)
        goods, other = self.random.sample(words(GOODS), 2)
        return [
            self.random.choice(
                [
                    f"{x} has {a} {goods} and {y} gives {x} {b} more. {x} then shares them equally "
                    f"among {c} friends. How many {goods} does each friend get, and how many stay?",
                    f"A shop sells {goods} for ${c} each and {other} for ${d} each. {x} buys {b} "
                    f"{goods} and {a} {other}. How much does {x} pay?",
                    f"{x} walks {c} km every day and {y} walks {d} km more. How far do the two "
                    f"walk together in {b} days?",
                    f"A train travels {a * c} km in {c} hours. How far does it travel in "
                    f"{c + d} hours at the same speed?",
                    f"{x} reads {b} pages a day. The book has {b * c + d} pages. How many days "
                    f"does {x} need to finish it?",
                    f"{x} is {a} years old and {y} is {b} years younger. How old will {y} be in "
                    f"{c} years?",
                    f"A box holds {b} {goods}. {x} has {c} full boxes and {d} loose {goods}. After "
                    f"selling {a} percent of them, how many {goods} are left?",
                    f"{x} earns ${b} per hour and works {c} hours a day, {d} days a week. How much "
                    f"does {x} earn in four weeks?",
                    f"{x} spends half of ${a * 4} on {goods} and a quarter of the rest on {other}. "
                    f"How much money is left?",
                    f"There are {a} students in a class. {b} percent play chess. Each chess player "
                    f"needs {c} {goods}. How many {goods} are needed?",
                    f"{x} bakes {b} trays of {c} cookies. {y} eats {d} and they sell the rest in "
                    f"bags of {n(3, 6)}. How many bags do they fill?",
                    f"A tank holds {a * 10} liters. It fills at {b} liters per minute and leaks "
                    f"{d} liters per minute. How long until it is full?",
                ]
            )
        ]

    def maths(self) -> Turns:
        n = self.number
        a, b, c = n(2, 20), n(2, 40), n(2, 12)
        return [
            self.random.choice(
                [
                    f"Solve for x: {a}x + {b} = {b + a * c}.",
                    f"What is {n(10, 99)} times {n(10, 99)}?",
                    f"What is the area of a triangle with base {a} and height {b}?",
                    f"A circle has radius {a}. What are its area and circumference?",
                    f"Two dice are thrown. What is the probability that the sum is {n(2, 12)}?",
                    f"Find the derivative of f(x) = {a}x^3 - {b}x + {c}.",
                    f"What is {n(5, 60)}% of {n(20, 900)}?",
                    f"Simplify ({a}x + {b})({c}x - {a}).",
                    f"If f(x) = {a}x^2 + {b}, what is f({c})?",
                    f"What is the next number: {a}, {a + c}, {a + 2 * c}, {a + 3 * c}, ...?",
                    f"A line passes through ({a}, {b}) and ({a + c}, {b + 2 * c}). Find its slope.",
                    f"How many ways are there to choose {n(2, 4)} people out of {n(5, 12)}?",
                    f"What remains when {n(50, 500)} is divided by {n(3, 12)}?",
                    f"Convert {n(1, 9)}/{n(10, 20)} to a decimal and a percentage.",
                    f"Solve the inequality |x - {a}| < {b}.",
                ]
            )
        ]

    def reasoning(self) -> Turns:
        x, y, z = self.random.sample(words(NAMES), 3)
        goods = self.one(GOODS)
        return [
            self.random.choice(
                [
                    f"{x} is taller than {y}, and {y} is taller than {z}. Who is the shortest?",
                    f"{x} sits left of {y}. {z} sits right of {y}. Who sits in the middle?",
                    f"If all {goods} are red and this is not red, can it be one of the {goods}?",
                    f"{x}'s mother is {y}'s sister. How is {y} related to {x}?",
                    f"{x} finished before {y} but after {z}. In which order did they finish?",
                    "Which word does not belong: "
                    + ", ".join([*self.random.sample(words(GOODS), 3), self.one(PLACES)])
                    + "? Explain.",
                    f"It takes {self.number(2, 9)} people {self.number(2, 9)} hours to paint a "
                    "wall. What happens with twice as many people? Explain your reasoning.",
                    f"One of {x}, {y} and {z} took the {goods}. {x} says it was {y}. {y} says it "
                    f"was not {z}. Only one of them tells the truth. Who took them?",
                    f"What would happen if there were no {self.subject()}? Think step by step.",
                    f"{x} faces north, turns right twice and then left. Where does {x} look now?",
                ]
            )
        ]

    def coding(self) -> Turns:
        chore, language = self.one(CHORES), self.one(LANGUAGES)
        return [
            self.random.choice(
                [
                    f"Write a function in {language} that {chore}.",
                    f"Write a {language} program that {chore}.",
                    f"How do I write code in {language} that {chore}? Explain briefly.",
                    f"Implement code in Python that {chore}. Include a short example of its use.",
                    f"I need a Python function that {chore}. Handle empty input.",
                ]
            )
        ]

    def completing(self) -> Turns:
        signature, doc, _ = self.random.choice(self.functions)
        quoted = textwrap.indent(f'"""{doc}\n"""', "    ")
        asked = self.one(
            "Complete this function.;Finish the following code.;Implement the function below.;"
            "Write the body of this Python function.;Fill in the missing code.;Complete the code."
        )
        return [f"{asked}\n\n{signature}\n{quoted}\n"]

    def code_reading(self) -> Turns:
        source = self.random.choice(self.functions)[2]
        asked = self.one(
            "What does this code do?;Explain the following code.;Find bugs in this function.;"
            "Write a docstring for this function.;Write tests for this code.;Refactor this code.;"
            "Rewrite this function so that it is easier to read.;Translate this to JavaScript."
        )
        return [f"{asked}\n\n```python\n{source}\n```"]

    def reading(self) -> Turns:
        if self.random.random() < 0.5 and self.seeds:
            text = self.random.choice(self.seeds)["output"][:700]
        else:
            text = " ".join(self.random.choice(self.functions)[1].split())
        asked = self.one(
            "Summarize this text.;Rewrite the following in simpler words.;Translate into Spanish.;"
            "Extract the key points of this text as a list.;Give this text a title.;"
            "Write three questions about this text.;Correct and improve the following text.;"
            "List all nouns in this text.;What is the tone of this text?;Continue this text.;"
            "Write the opposite of this text.;Paraphrase this passage.;Extract all names as JSON."
        )
        return [f"{asked}\n\n{text}"]

    def records(self) -> Turns:
        rows = [
            f"{self.one(NAMES)} bought {self.number(1, 40)} {self.one(GOODS)} in "
            f"{self.one(PLACES)} for ${self.number(2, 90)}."
            for _ in range(self.number(2, 6))
        ]
        asked = self.one(
            "Extract the names and prices as a JSON list.;Turn this into a table.;"
            "Who paid the most?;Give the output as CSV with a header.;What is the total price?;"
            "Sort these by price, lowest first.;Which places are mentioned?;Count the items."
        )
        return [f"{asked}\n\n" + self.random.choice(["\n", " "]).join(rows)]

    def seeded(self) -> Turns:
        if not self.seeds:
            return self.advice()
        task = self.random.choice(self.seeds)
        return [f"{task['instruction']}\n{task['input']}".strip()]

    def next(self) -> Turns:
        kinds = list(KINDS)
        kind = self.random.choices(kinds, [KINDS[k] for k in kinds])[0]
        turns: Turns = kind(self)
        if self.random.random() < SECOND_TURNS:
            coding = kind in (Maker.coding, Maker.completing, Maker.code_reading)
            turns.append(self.one(CODE_FOLLOW_UPS if coding else FOLLOW_UPS))
        return turns


SECOND_TURNS = 0.25
KINDS: dict[Callable[[Maker], Turns], float] = {
    Maker.writing: 12,
    Maker.role: 8,
    Maker.explaining: 14,
    Maker.advice: 10,
    Maker.sums: 12,
    Maker.maths: 6,
    Maker.reasoning: 4,
    Maker.coding: 8,
    Maker.completing: 10,
    Maker.code_reading: 4,
    Maker.reading: 6,
    Maker.records: 3,
    Maker.seeded: 3,
}


def library_functions() -> list[tuple[str, str, str]]:
    """Return signature, docstring and source of functions of Python's library, of readable size."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)):
            doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            code = ast.get_source_segment(source, node) if doc else None
            if doc is None or code is None or not 40 <= len(doc) <= 500 or len(code) > 1200:
                continue
            assert isinstance(node, ast.FunctionDef)
            arguments = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
            signature = f"def {node.name}({', '.join(arguments)}):"
            found.append((signature, doc, textwrap.dedent(code)))
    return found


@click.command(help=__doc__)
@click.option("--seeds", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--count", default=9000, show_default=True, help="Conversations, all different.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
def main(seeds: Path | None, count: int, seed: int, out: Path) -> None:
    lines = json_lines(seeds) if seeds else ()
    maker = Maker([json.loads(line) for line, _ in lines], seed)
    asked: dict[str, Turns] = {}
    for _ in range(20 * count):
        if len(asked) == count:
            break
        turns = maker.next()
        asked.setdefault(turns[0], turns)
    out.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in asked.values()))
    click.echo(f"{len(asked):,} conversations in {out}", err=True)


if __name__ == "__main__":
    main()
