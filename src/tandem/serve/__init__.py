"""One engine over HTTP: a scheduler and a thread that drives a `Batch`, and the APIs that clients speak to it."""
