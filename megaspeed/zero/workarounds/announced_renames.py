"""DeepSpeed 0.19.8, comm/torch.py:47-200: collectives are called by names that torch 2.13 announces
to rename, which torch says once a rank.

Other warnings and errors still come through.
"""

import warnings


def hide_announced_renames() -> None:
    """Hides torch's FutureWarnings about its collectives."""
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*")
