"""The clock: seconds of a step on nodes with slow links, from the collectives of the compiled program."""
