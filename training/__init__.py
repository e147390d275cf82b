"""From a config to the parts of a run: model, sharding plan, optimizer chain, batches and compiled programs."""
