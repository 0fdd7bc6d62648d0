"""The OpenAPI 3.1 description, made from the structs that the bodies are decoded to."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

import tandem
from tandem.serve.errors_api import KINDS

_REF = "#/components/schemas/{name}"
_ERRORS = sorted({kind.status for kind in KINDS.values()})
_READS = {
    "/v1/models": "The models with their states",
    "/health": "Whether the server answers, and how its models are",
    "/ready": "Whether the models can take requests",
    "/props": "Context, template and recent prompts of a model",
}
_ANTHROPIC = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {"type": {"const": "error"}, "error": {"type": "object", "required": ["type", "message"]}},
}
_OPENAI = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "object", "required": ["message", "type"], "properties": {"message": {"type": "string"}}}
    },
}


@cache
def _schemas(bodies: tuple[type, ...]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    found, components = msgspec.json.schema_components(bodies, ref_template=_REF)
    return list(found), components


def description(posts: Mapping[str, Any]) -> dict[str, Any]:
    """The document. posts: by path, with `body`, `about`."""
    schemas, components = _schemas(tuple(post.body for post in posts.values()))
    paths: dict[str, Any] = {}
    for (path, post), schema in zip(posts.items(), schemas, strict=True):
        paths[path] = {"post": _operation(post.about, path, schema)}
    for path, about in _READS.items():
        paths[path] = {"get": _operation(about, path, None)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": tandem.__version__, "description": "One language model over HTTP"},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _OPENAI, "MessagesError": _ANTHROPIC},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(about: str, path: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    error = "MessagesError" if path.startswith("/v1/messages") else "Error"
    responses: dict[str, Any] = {
        str(status): {
            "description": "An error",
            "content": {"application/json": {"schema": {"$ref": _REF.format(name=error)}}},
        }
        for status in _ERRORS
    }
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if schema is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses["200"] = {"description": about, "content": content}
    operation: dict[str, Any] = {
        "summary": about,
        "operationId": path.strip("/").replace("/", "_"),
        "responses": responses,
    }
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
