"""The main of a rank's process: `python -m penstock.launch.rank_process`, descriptors behind it.

Started by `executor.multiproc`, never by people. It lives exactly as long as the other ends of its sockets.
"""

from __future__ import annotations

import os
import sys

from penstock.executor.worker import main
from penstock.launch.rank import build_rank

if __name__ == "__main__":
    status = main(sys.argv[1:], build_rank)
    sys.stderr.flush()
    os._exit(status)
