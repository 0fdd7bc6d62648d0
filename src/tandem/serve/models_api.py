"""What a server tells of itself: models, health, readiness, props, and the vocabulary at work. Nothing here wakes a
model or waits for it.
"""

import time
from collections.abc import Mapping
from typing import Any

import tandem
from tandem.serve.bodies import DetokenizeBody, TokenizeBody
from tandem.serve.completions import checked_ids
from tandem.serve.errors_api import problem, without_paths
from tandem.serve.model import Models, ServedModel

STATES = {"loading": "loading", "loaded": "loaded", "sleeping": "sleeping", "failed": "failed", "stopping": "stopping"}


def model_list(models: Models, query: Mapping[str, str]) -> dict[str, Any]:
    """`/v1/models` for clients of all APIs at once."""
    data = [model_entry(model) for model in models.all]
    body = {"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    if "client_version" in query:  # a client that wants its own list here, and takes an empty one for "nothing special"
        body["models"] = []
    return body


def model_entry(model: ServedModel) -> dict[str, Any]:
    """One model as listed."""
    snapshot, able = model.worker.snapshot(), model.capabilities
    status: dict[str, Any] = {"value": STATES[snapshot.state]}
    if snapshot.state == "failed":
        status["reason"] = without_paths(snapshot.reason)
    ctx = model.ctx or model.trained_ctx
    return {
        "id": model.name,
        "object": "model",
        "type": "model",
        "created": model.created,
        "owned_by": "tandem",
        "display_name": model.name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created)),
        "aliases": list(model.offer.aliases),
        "context_length": ctx,
        "max_model_len": ctx,
        "max_context_length": model.trained_ctx,
        "input": ["text"],
        "output": ["text"],
        "supports_tools": able.supports_tools and model.format != "none",
        "reasoning": able.supports_reasoning,
        "status": status,
    }


def health(models: Models) -> dict[str, Any]:
    """The API is up; how each model is."""
    return {"status": "ok", "models": {model.name: _state(model) for model in models.all}}


def ready(models: Models, name: str | None) -> dict[str, Any]:
    """Whether the named model, or all, can take requests: it is loaded, or wakes by itself. Raises ApiError (503)."""
    for model in [models.find(name)] if name else models.all:
        snapshot = model.worker.snapshot()
        if snapshot.state not in ("loaded", "sleeping"):
            raise problem(
                "loading", retry_after_s=max(1.0, snapshot.retry_after_s), model=model.name, state=snapshot.state
            )
    return {"status": "ready", "models": {model.name: _state(model) for model in models.all}}


def props(model: ServedModel) -> dict[str, Any]:
    """What clients of llama-server read, and how recent prompts met the cache. No paths, no prompts."""
    able, snapshot = model.capabilities, model.worker.snapshot()
    sampling = model.sampling(able.supports_reasoning, {})
    names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    )
    source = model.template.source or ""
    return {
        "default_generation_settings": {
            "n_ctx": model.ctx,
            "params": {name: getattr(sampling, name) for name in names},
        },
        "total_slots": model.offer.slots,
        "model_alias": model.name,
        "chat_template": source,
        "chat_template_caps": {
            "supports_tools": able.supports_tools,
            "supports_tool_calls": able.supports_tools and model.format != "none",
            "supports_system_role": able.supports_system,
            "system_first": able.system_first,
            "supports_parallel_tool_calls": able.supports_tools,
            "supports_preserve_reasoning": able.keeps_reasoning,
            "supports_reasoning_effort": "reasoning_effort" in source,
            "supports_reasoning": able.supports_reasoning,
        },
        "modalities": {"vision": False, "audio": False},
        "build_info": f"tandem {tandem.__version__}",
        "is_sleeping": snapshot.state == "sleeping",
        "state": snapshot.state,
        "tool_format": model.format,
        "recent_prompts": [
            {
                "id": record.id,
                "at_s": round(record.at_s, 3),
                "prompt_tokens": record.prompt_tokens,
                "shared": record.shared,
                "reused": record.reused,
                "diverged": record.diverged,
            }
            for record in reversed(model.recent.records)
        ],
    }


def tokenized(body: TokenizeBody, model: ServedModel) -> dict[str, Any]:
    """Tokens of a text; control tokens written in it are such only if the body says so."""
    ids = model.tokenizer.encode(
        body.content, parse_special=bool(body.parse_special), add_special=bool(body.add_special)
    )
    if not body.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": token, "piece": _piece(model, token)} for token in ids]}


def detokenized(body: DetokenizeBody, model: ServedModel) -> dict[str, Any]:
    """Text of tokens. Raises ApiError for tokens that the vocabulary lacks."""
    return {"content": model.tokenizer.decode(checked_ids(body.tokens, model.tokenizer, "tokens"), keep_control=True)}


def _piece(model: ServedModel, token: int) -> str | list[int]:
    data = model.tokenizer.token_bytes(token, keep_control=True)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _state(model: ServedModel) -> dict[str, Any]:
    snapshot = model.worker.snapshot()
    reason = {"reason": without_paths(snapshot.reason)} if snapshot.state == "failed" else {}
    return {"state": snapshot.state, "queued": snapshot.queued, "running": snapshot.running, **reason}
