"""Ends the process at import, as some packages do where they find no GPU."""

import sys

sys.exit("shoddy wants a GPU")
