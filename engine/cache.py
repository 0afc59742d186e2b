"""Where what is made once for this machine lies: models, compiled kernels, a compiled core."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$TANDEM_CACHE, else ~/.cache/tandem."""
    return Path(os.environ.get("TANDEM_CACHE") or Path.home() / ".cache" / "tandem")
