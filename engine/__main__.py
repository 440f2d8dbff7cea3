"""`python -m engine COMMAND`: every command ends with 0, or with 1 and one clear line on stderr."""

import logging
import sys
import warnings

from engine.cli import main

if __name__ == "__main__":
    if "--debug" not in sys.argv:  # what libraries advise their developers would bury the one line a user needs
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    sys.exit(main(sys.argv[1:]))
