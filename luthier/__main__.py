"""``python -m luthier`` is the command ``luthier``, also where the command itself is not on the path (torchrun)."""

import sys

from luthier.cli.main import main

if __name__ == "__main__":  # a worker process imports this module under another name, and must not start the command
    main(sys.argv[1:])
