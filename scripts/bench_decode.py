#!/usr/bin/env python3
"""How fast a fuel decodes on this machine: ``rocket bench decode``, with the same options."""

import sys

import needs_engine  # noqa: F401  (what is missing ends the script here)
from rocket.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "decode"]
    main()
