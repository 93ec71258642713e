"""`python -m isoscale`."""

from isoscale.cli.main import run

run()
