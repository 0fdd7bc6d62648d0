"""Text beside the engine: tokenizers from GGUF metadata, incremental decoding, chat templates and stop strings."""
