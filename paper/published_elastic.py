"""Published numbers of Gemini, which keeps checkpoints in the memories of other machines."""

GEMINI = "Gemini, SOSP 2023"
MACHINES, COPIES = 16, 2
# Percent of the failures of so many machines at once that lose no checkpoint, with its placement in groups
RECOVERABLE = {2: 93.3, 3: 80.0}
RING_IS_LOWER_AT_3 = 25  # as the paper says of a placement in a ring
