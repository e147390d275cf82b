"""The names of what is in the directory of a run (`--workdir`)."""

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
COLLECTIVES = "collectives.json"  # of the compiled step
METRICS = "metrics.jsonl"  # a line a logged step; docs/metrics.md
TENSORBOARD = "tensorboard"  # the same, for TensorBoard
CHECKPOINTS = "checkpoints"
EVENTS = "events.jsonl"  # of all attempts, and of the engine that starts them
ATTEMPTS = "attempts.json"
REPLICAS = "replicas"  # for each independent replica a directory with its own files, but the checkpoints
# at the end
SUMMARY = "summary.json"
SAMPLE = "sample.txt"
MESH = "mesh.png"
REPORT = "report.html"
