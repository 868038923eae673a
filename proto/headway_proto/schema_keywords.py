"""The keywords of JSON schemas.

Must not know: what is done with them.
"""

OF_ONE = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
OF_MANY = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
BY_NAME = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])
SAYS_NOTHING_OF_VALUES = frozenset(
    [
        "$anchor",
        "$comment",
        "$id",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "default",
        "description",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
    ]
)
_OTHERS = frozenset(
    [
        "$dynamicAnchor",
        "$dynamicRef",
        "$recursiveAnchor",
        "$recursiveRef",
        "$ref",
        "const",
        "contentSchema",
        "dependencies",
        "dependentRequired",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "pattern",
        "required",
        "type",
        "uniqueItems",
        "x-guidance",
    ]
)

ASSERTIONS = OF_ONE | OF_MANY | BY_NAME | _OTHERS
"""The keywords that say something of values."""
KEYWORDS = ASSERTIONS | SAYS_NOTHING_OF_VALUES

_OF_NUMBERS = frozenset(["exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"])
OF_KINDS = {
    "string": frozenset(["contentSchema", "format", "maxLength", "minLength", "pattern"]),
    "integer": _OF_NUMBERS,
    "number": _OF_NUMBERS,
    "boolean": frozenset[str](),
    "null": frozenset[str](),
    "array": frozenset(
        [
            "additionalItems",
            "contains",
            "items",
            "maxContains",
            "maxItems",
            "minContains",
            "minItems",
            "prefixItems",
            "unevaluatedItems",
            "uniqueItems",
        ]
    ),
    "object": frozenset(
        [
            "additionalProperties",
            "dependencies",
            "dependentRequired",
            "dependentSchemas",
            "maxProperties",
            "minProperties",
            "patternProperties",
            "properties",
            "propertyNames",
            "required",
            "unevaluatedProperties",
        ]
    ),
}
"""Those that say something of values of one type alone."""
