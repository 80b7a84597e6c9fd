"""`python -m benchmarks`: see `run.py`."""

from benchmarks.run import app

app()
