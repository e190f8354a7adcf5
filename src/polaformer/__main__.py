"""The command line as `python -m polaformer`, and therefore as `torchrun -m polaformer`."""

import sys

from polaformer.cli.main import main

sys.exit(main())
