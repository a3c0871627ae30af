"""`python -m astraflow` is `python -m astraflow.cli`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("astraflow.cli", run_name="__main__")
