"""`python -m logitless`, which torchrun can start as a module."""

from logitless.cli import main

main()
