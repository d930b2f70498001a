"""JSON schemas narrowed for answers, so that a model cannot write without end.

All that conforms to the narrower form conforms to the schema. Knows nothing of grammars.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SPACING = {"whitespace_flexible": True, "whitespace_pattern": r"\x20?"}  # one blank at most
MOST_INTEGER = 2**53 - 1  # exact in every reader of JSON (RFC 8259)
NUMBER = {"minimum": -1e15, "maximum": 1e15, "multipleOf": 1e-9}
INTEGER = {"minimum": -MOST_INTEGER, "maximum": MOST_INTEGER}
# Characters of texts whose digits could go on: a fraction of a second has nine.
LONGEST = {"date-time": 35, "time": 24, "duration": 32}
# Where a number has one of these, the others may not fit it; `minimum` and `maximum` are completed.
OF_NUMBERS = {"exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
OF_VALUES = {"enum", "const"}
OF_OBJECTS = {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"}
# Where several schemas apply to one value, a narrowed one can contradict another.
LAID_OVER = {"allOf", "oneOf", "not", "if", "dependentSchemas"}
BESIDE_PROPERTIES = {"$ref", "anyOf"}
MAPS, LISTS = {"properties", "$defs", "definitions"}, {"anyOf", "prefixItems"}


def json_form(schema: Any, is_lenient: bool = False) -> Any:
    """Return `schema` with bounded numbers, times, objects, and at most one blank between tokens.

    Where `is_lenient`, llguidance ignores the keywords that it does not know.
    """
    if not isinstance(schema, dict):
        return schema
    is_laid_over = any(
        LAID_OVER & part.keys() or ("properties" in part and BESIDE_PROPERTIES & part.keys())
        for part in _dictionaries(schema)
    )
    options = {**SPACING, "lenient": is_lenient}
    return {"x-guidance": options} | (schema if is_laid_over else _narrowed(schema))


def _dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _dictionaries(inner)


def _narrowed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = {key: _inner(key, value) for key, value in schema.items()}
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if not (OF_NUMBERS | OF_VALUES) & schema.keys():
        if "number" in kinds:
            made = _bounded(made, NUMBER)
        elif "integer" in kinds:
            made = _bounded(made, INTEGER)
    bound = LONGEST.get(str(schema.get("format")))
    if bound is not None and not ({"minLength", "maxLength"} | OF_VALUES) & schema.keys():
        made["maxLength"] = bound
    properties, required = schema.get("properties"), schema.get("required", [])
    if (
        isinstance(properties, dict)
        and properties
        and isinstance(required, list)
        and all(name in properties for name in required)
        and not OF_OBJECTS & schema.keys()
    ):
        made["additionalProperties"] = False
    return made


def _bounded(schema: dict[str, Any], bounds: Mapping[str, float]) -> dict[str, Any]:
    """Return the schema of a number with the bounds that it lacks, if its own lie within them."""
    own = [schema[key] for key in ("minimum", "maximum") if key in schema]
    if not all(isinstance(value, int | float) for value in own):
        return schema
    fits = all(bounds["minimum"] < value < bounds["maximum"] for value in own)
    # Half of a number's steps may lie beside a bound that is no multiple of them.
    whole = fits and all(float(value * 1e6).is_integer() for value in own)
    return {**bounds, **schema} if whole else schema


def _inner(key: str, value: Any) -> Any:
    """Return the value of a keyword, with the schemas inside it narrowed."""
    if key in MAPS and isinstance(value, dict):
        return {name: _narrowed(inner) for name, inner in value.items()}
    if key in LISTS and isinstance(value, list):
        return [_narrowed(inner) for inner in value]
    return _narrowed(value) if key in ("items", "additionalProperties") else value
