"""`python -m bench NAME`, for where there is no `kvmesh`."""

import sys

from bench.command import main

sys.exit(main(sys.argv[1:]))
