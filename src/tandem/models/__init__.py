"""One file per GGUF architecture: config, tensor table, state and forward pass. Never names a device."""
