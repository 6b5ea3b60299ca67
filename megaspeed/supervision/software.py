"""The software of a rank that determines what is trained."""

import hashlib
from importlib.metadata import version
from pathlib import Path

import torch

from megaspeed import __version__

_CODE = Path(__file__).parents[1]


def software() -> dict[str, str]:
    """The versions that must be the same on all ranks, by name; takes about 10 ms.

    The version of megaspeed includes a hash of its source, because two checkouts may have the same
    number.
    """
    code = hashlib.sha256()
    for file in sorted(_CODE.rglob("*.py")):
        code.update(str(file.relative_to(_CODE)).encode() + b"\0" + file.read_bytes() + b"\0")
    return {
        "megaspeed": f"{__version__} (code {code.hexdigest()[:12]})",
        "torch": str(torch.__version__),
        "deepspeed": version("deepspeed"),
    }
