"""Joins the other ranks, says who it is and what they know of each other, and leaves."""

import json
import sys

import torch

from isoscale.cli.main import describe
from isoscale.errors import exit_code
from isoscale.parallel import world

try:
    ranks = world.join("cpu")
except Exception as error:
    if world.speaks():
        print(describe(error), file=sys.stderr)
    sys.exit(exit_code(error))
total = torch.tensor([float(ranks.rank + 1)])
ranks.all_reduce(total)
print(json.dumps({
    "rank": ranks.rank, "local_rank": ranks.local_rank, "hosts": ranks.hosts, "backend": ranks.backend,
    "sum": total.item(), "heard": ranks.all_gather(ranks.rank), "again": world.join("cpu") is ranks,
}))  # fmt: skip
