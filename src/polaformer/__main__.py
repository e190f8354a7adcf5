"""`python -m polaformer`, and with it `torchrun -m polaformer`, is the command line."""

import sys

from polaformer.cli.main import main

sys.exit(main())
