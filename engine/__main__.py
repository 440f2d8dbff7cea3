"""`python -m engine COMMAND`: every command ends with 0, or with 1 and one clear line on stderr."""

import sys

from engine.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
