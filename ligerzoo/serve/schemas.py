"""The schema of an answer that a client asks for: none for text, any JSON object, or a JSON schema."""

from __future__ import annotations

from ligerzoo.serve.fields import FLAG, OBJECT, STRING, Fields, Json, check_field, check_names, checked, read


def read_schema(fields: Fields) -> Json | None:
    """Returns the JSON schema of the field `response_format`; None for text.

    Raises:
        LigerzooError: the field is invalid. Whether the schema can be enforced, `Grammar` says.
    """
    given: Fields = read(fields, "response_format", OBJECT, {"type": "text"})
    kind, where = given.get("type"), "response_format.json_schema"
    expected = '"text", "json_object" or "json_schema"'
    check_field(kind in ("text", "json_object", "json_schema"), "response_format.type", kind, expected)
    check_names(given, ("type", "json_schema") if kind == "json_schema" else ("type",), {})
    if kind != "json_schema":
        return {"type": "object"} if kind == "json_object" else None
    named: Fields = checked(given.get("json_schema"), where, OBJECT)
    check_names(named, ("name", "description", "schema", "strict"), {})
    checked(named.get("name"), f"{where}.name", STRING)
    read(named, "description", STRING, "", f"{where}.description")
    read(named, "strict", FLAG, False, f"{where}.strict")
    return {**checked(named.get("schema"), f"{where}.schema", OBJECT)}


SCHEMA = "response_format.json_schema.schema"
"""What messages call the schema."""
