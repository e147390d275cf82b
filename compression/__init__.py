"""Makes the hops smaller: hop two, the first transform of the optax chain; codecs of gathers and hop one; local SGD."""
