"""What stands beside the state in a run's checkpoints, so that each is a model one can take away.

    the run's tokenizer                          every checkpoint has it
    generation_config.json of an imported model  every one, as long as the tokenizer is the same

That file names tokens by their ids, and another tokenizer's ids are other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from megaspeed.checkpoint.tokenizer_files import GENERATION, TOKENIZER
from megaspeed.data.tokenizer import TextTokenizer


def generation_file(checkpoint: Path, carried: Mapping[str, bytes]) -> dict[str, bytes]:
    """Name -> content of what a run goes on to carry of a checkpoint; nothing with other tokens.

    Args:
        checkpoint: one that is whole, and that the run starts from or goes on from.
        carried: name -> content of the files of the run's tokenizer.
    """
    file, tokenizer = checkpoint / GENERATION, checkpoint / TOKENIZER
    if not (file.is_file() and tokenizer.is_file() and TOKENIZER in carried):
        return {}
    same = _fingerprint(tokenizer.read_bytes()) == _fingerprint(carried[TOKENIZER])
    return {GENERATION: file.read_bytes()} if same else {}


def _fingerprint(tokenizer_json: bytes) -> str:
    # Which of its tokens ends a document is not in the fingerprint.
    return TextTokenizer(Tokenizer.from_buffer(tokenizer_json), end_of_text=0).fingerprint
