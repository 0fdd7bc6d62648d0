"""From placed weights to token ids: plan, cache, step, sampler and engine."""
