"""Scripts that measure, and their recorded results: each result with command, commit and machine."""
