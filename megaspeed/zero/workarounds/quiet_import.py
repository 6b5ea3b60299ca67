"""DeepSpeed 0.19.8, utils/logging.py: the library logs every step of its set-up at INFO on every
rank's console; comm/torch.py calls collectives by names that torch 2.13 announces to
rename, which torch says once a rank.

Other warnings and errors still come through.
"""

import logging
import warnings

from deepspeed.utils import logger


def log_warnings_only() -> None:
    """Raises the threshold of DeepSpeed's logger to WARNING."""
    logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*")
