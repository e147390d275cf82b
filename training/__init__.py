"""Builds the parts of a run from its config: model, sharding plan, optimizer chain, batches, compiled programs."""
