"""Narrower forms of JSON schemas: what they let through conforms, and none goes on for ever."""

from __future__ import annotations

import json

import pytest

import fasteagle
from fasteagle.answering.grammar import GrammarCompiler
from fasteagle.answering.json_form import json_form
from fasteagle.loading.tokenizer import load_tokenizer
from fasteagle.options import GrammarSpec
from helpers import TINY_VOCAB

pytest.importorskip("llguidance")

INTEGER, NUMBER, CHOICE = {"type": "integer"}, {"type": "number"}, {"enum": ["S", "M"]}


def record(required=None, **properties):
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required}


SMALL = [
    INTEGER,
    NUMBER,
    CHOICE,
    {"type": "boolean"},
    {"type": ["integer", "null"]},
    {"type": "string", "maxLength": 10},
    {"type": "array", "maxItems": 0},
    {"type": "array", "items": INTEGER, "maxItems": 3},
    {"type": "array", "items": record(k=CHOICE), "minItems": 1, "maxItems": 3},
    {"anyOf": [INTEGER, {"type": "string", "maxLength": 5}]},
    record(size=CHOICE),
    record(a=INTEGER, b=NUMBER),
    record(name={"type": "string", "maxLength": 12}, age=INTEGER),
    record(at=record(x=INTEGER)),
    record(price={"type": "number", "minimum": 0}),
    record((), ok={"type": "boolean"}),
    {"$defs": {"p": CHOICE}, **record(("p",), p={"$ref": "#/$defs/p"}, q={"$ref": "#/$defs/p"})},
]
PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OPEN = {"allOf": [PERSON, {"type": "object", "properties": {"b": {}}, "required": ["b"]}]}


@pytest.fixture(scope="module")
def accepts(tiny_dir):
    tokenizer = load_tokenizer(tiny_dir)
    compiler = GrammarCompiler(tokenizer, TINY_VOCAB)

    def whole(schema, text):
        kind = "json_object" if schema is None else "json_schema"
        mask = compiler.start(GrammarSpec(kind, "" if schema is None else json.dumps(schema)))
        ids = tokenizer.encode(text)
        matcher = mask._matcher
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return whole


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (
            PERSON,
            ['{"a":1}', '{"a": 1}', '{ "a" : 1 }'],
            ['{"a":  1}', '{\n"a":1}', '{"a":1,"b":2}'],
        ),
        (None, ['{"a": {"b": []}}', "{}"], ['{"a":\t1}', '{"a":   1}']),
        ({**PERSON, "additionalProperties": True}, ['{"a":1,"b":2}'], []),
        ({**PERSON, "required": ["a", "z"]}, ['{"a":1,"z":2}'], ['{"a":1}']),
        ({**PERSON, "minProperties": 2}, ['{"a":1,"b":2}'], []),
        (OPEN, ['{"a":1,"b":2}'], ['{"a":1}']),
        ({"type": "array", "maxItems": 0}, ["[]", "[ ]"], ["[1]", "[  ]"]),
        ({"type": "integer"}, ["0", "-12", str(2**53 - 1)], [str(2**53), "1" * 40, "1.5"]),
        ({"type": "integer", "minimum": 10**16}, [str(10**17)], ["5"]),
        ({"type": "integer", "minimum": 1}, ["1", str(2**53 - 1)], ["0", "1" * 40]),
        ({"type": "number", "minimum": 0}, ["0", "0.25", "7"], ["-1", "0." + "3" * 30, "1" * 30]),
        ({"type": "number", "minimum": 0.5, "maximum": 2}, ["0.5", "1.25"], ["0.4", "2.1"]),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.1"], ["0"]),
        ({"type": "number"}, ["0", "-3.25", "0.000000001"], ["0." + "3" * 30, "1" * 30]),
        ({"type": ["integer", "null"]}, ["7", "null"], ["1" * 40]),
        (
            {"type": "string", "format": "date-time"},
            ['"2026-01-31T23:59:59Z"', '"2026-01-31T23:59:59.123456789+01:00"'],
            [f'"2026-01-31T23:59:59.{"0" * 30}Z"'],
        ),
        (
            record(at={"type": ["string", "null"], "format": "time"}),
            ['{"at": "23:59:59.123456789+01:00"}', '{"at": null}'],
            [f'{{"at": "23:59:59.{"0" * 30}Z"}}'],
        ),
        ({"format": "duration"}, ['"P1Y2M3DT4H5M6S"', "3"], [f'"P{"1" * 40}D"']),
        ({"format": "duration", "enum": ["P" + "1" * 50 + "D"]}, [f'"P{"1" * 50}D"'], []),
        ({"format": "duration", "minLength": 50}, [f'"P{"1" * 50}D"'], ['"P1D"']),
        ({"enum": [10**17, "x"]}, [str(10**17), '"x"'], ["7"]),
        ({"$defs": {"p": PERSON}, "items": {"$ref": "#/$defs/p"}}, ['[{"a": 1}]'], ['[{"b": 1}]']),
        (True, ["1", "{}"], []),
    ],
    ids=str,
)
def test_what_a_form_lets_through(accepts, schema, yes, no):
    assert [text for text in yes if not accepts(schema, text)] == []
    assert [text for text in no if accepts(schema, text)] == []


def test_a_bound_that_no_float_holds_stays():
    schema = {"type": "integer", "minimum": 10**400}
    assert json_form(schema).items() >= schema.items()


@pytest.fixture(scope="module")
def default_model(default_model_path):
    with fasteagle.load(str(default_model_path)) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("schema", SMALL, ids=json.dumps)
def test_small_forms_are_complete_within_100_tokens(default_model, schema):
    for seed in range(3):
        answer = default_model.chat(
            "Answer in JSON.", json_schema=schema, temperature=1.0, seed=seed, max_new_tokens=100
        )
        assert answer.finish == "eos", answer.text
        json.loads(answer.text)
