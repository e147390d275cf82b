"""What a run will hold, send and cost, read from its compiled program."""
