"""What the processes of the bench run: the nursery, or one victim, whose plan comes as JSON."""

from __future__ import annotations

import json
import sys

from surefoot.bench.chaos.nursery import serve
from surefoot.bench.chaos.victim import Plan, main

if sys.argv[1] == "nursery":
    serve()
else:
    main(Plan(**json.loads(sys.argv[1])))
