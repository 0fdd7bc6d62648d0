"""`/v1/embeddings`: mean-pooled hidden states after the last norm, scaled to length 1."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.serve.answer import Caller
from tandem.serve.bodies import EmbeddingsBody
from tandem.serve.completions import token_lists
from tandem.serve.errors_api import problem
from tandem.serve.model import ServedModel

MAX_INPUTS = 256
ENCODINGS = ("float", "base64")


def embedding_inputs(body: EmbeddingsBody, model: ServedModel) -> list[list[int]]:
    """Token ids of each input, in order. Raises ApiError for empty and over-long ones."""
    if body.encoding_format not in (None, *ENCODINGS):
        raise problem(
            "choices", field="encoding_format", found=repr(body.encoding_format), expected=" or ".join(ENCODINGS)
        )
    inputs = token_lists(body.input, model.tokenizer, "input", MAX_INPUTS)
    single = isinstance(body.input, str) or len(inputs) == 1
    for at, ids in enumerate(inputs):
        field = "input" if single else f"input[{at}]"
        if not ids:
            raise problem("empty_input", field=field)
        if model.ctx is not None and len(ids) >= model.ctx:
            raise problem("embedding_size", field=field, found=len(ids), model=model.name, most=model.ctx - 1)
    return inputs


async def embeddings(body: EmbeddingsBody, model: ServedModel, caller: Caller) -> dict[str, Any]:
    """The response. One input after the other, so that others get their turns between them. Raises ApiError."""
    inputs = await model.threaded(embedding_inputs, body, model)
    data = []
    for at, ids in enumerate(inputs):
        vector = await model.worker.embed(
            ids, client=caller.client, priority=caller.priority, deadline_s=caller.deadline_s
        )
        if body.dimensions is not None and body.dimensions != len(vector):
            raise problem("dimensions", "dimensions", found=body.dimensions, most=len(vector))
        data.append({"object": "embedding", "index": at, "embedding": _shown(vector, body.encoding_format)})
    tokens = _total(inputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": model.name, "data": data, "usage": usage, "tandem": {"pooling": "mean"}}


def _shown(vector: np.ndarray, encoding: str | None) -> list[float] | str:
    length = float(np.linalg.norm(vector))
    unit = (vector / length if length > 0 else vector).astype("<f4")
    return base64.b64encode(unit.tobytes()).decode() if encoding == "base64" else unit.tolist()


def _total(inputs: Sequence[list[int]]) -> int:
    return sum(map(len, inputs))
