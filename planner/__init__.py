"""The placement of every part of a run's state and the bytes on each device, before any program starts or compiles."""
