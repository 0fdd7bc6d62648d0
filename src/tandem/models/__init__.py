"""One file per GGUF architecture: config, tensor table, state and forward pass. Never names a device."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tandem.errors import FormatError, nearest
from tandem.models import gemma3, llama, qwen3, qwen35, qwen35moe

ARCHS: dict[str, ModuleType] = {module.ARCHITECTURE: module for module in (gemma3, llama, qwen3, qwen35, qwen35moe)}


def model_for(metadata: Mapping[str, Any]) -> ModuleType:
    """The model file (see `models.base`) for a GGUF's metadata; raises FormatError for an architecture without one."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise FormatError(
            f"metadata key general.architecture is {architecture!r}, expected the name of an architecture"
        )
    if architecture not in ARCHS:
        raise FormatError(f"architecture {architecture!r} is not supported{nearest(architecture, ARCHS)}")
    return ARCHS[architecture]
