"""Puts `megatron_cpu`, the helper of these tests, on the path: modules that import it are skipped without Megatron."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
