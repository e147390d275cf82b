"""Independent replicas: separate programs that exchange sums of gradients, and may join and leave (driver.py)."""
