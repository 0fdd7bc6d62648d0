"""Arithmetic on rows: each op's meaning in numpy (reference), its C++ twin, and the recorder that runs it."""
