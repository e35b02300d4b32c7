"""`python -m ropeway`: the same as the command `ropeway`."""

from ropeway.cli import main

if __name__ == "__main__":
    main()
