"""``megaspeed import-hf``: a Hugging Face model as a checkpoint that a run starts from.

    megaspeed import-hf DIR OUT [--tokenizer PATH | --no-tokenizer] [--no-verify]
    deepspeed scripts/pretrain.py --config FILE --set model.from_hf=DIR --resume OUT

DIR is a folder as save_pretrained writes it: config.json, safetensors or pytorch_model.bin, in one
file or many. OUT appears whole, after both implementations gave the same logits, or not at all.
"""

import argparse
from dataclasses import asdict
from typing import Any

from megaspeed.cli.export_hf import add_no_verify
from megaspeed.cli.options import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_INPUT,
    new_file,
    say,
    write_json,
)
from megaspeed.files.paths import path_argument


def add_to(commands: Any) -> None:
    """Adds the command."""
    text = "make a checkpoint of a Hugging Face model"
    parser = commands.add_parser("import-hf", help=text, description=text)
    parser.set_defaults(run=run)
    parser.add_argument("folder", type=path_argument, metavar="DIR", help="the model's folder")
    parser.add_argument("out", type=path_argument, metavar="OUT", help="the checkpoint to make")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--tokenizer",
        type=path_argument,
        metavar="PATH",
        help="a tokenizer.json, or a folder with one (the one beside the model)",
    )
    which.add_argument(
        "--no-tokenizer",
        dest="with_tokenizer",
        action="store_false",
        help="import the model without a tokenizer",
    )
    add_no_verify(parser)
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures there too")


def run(options: argparse.Namespace) -> int:
    """Imports; says what was written."""
    # Imported here: torch and transformers take seconds, which `check` need not wait for.
    from megaspeed.hugging_face.errors import Disagreement, HuggingFaceError
    from megaspeed.hugging_face.importing import import_model

    try:
        agreement = import_model(
            options.folder,
            options.out,
            tokenizer=options.tokenizer,
            with_tokenizer=options.with_tokenizer,
            verify=options.verify,
            tell=say,
        )
    except Disagreement as error:
        say(str(error), error=True)
        return EXIT_FAILED
    except (HuggingFaceError, FileExistsError) as error:
        say(str(error), error=True)
        return EXIT_WRONG_INPUT
    write_json(options, {"out": str(options.out), "agreement": agreement and asdict(agreement)})
    return EXIT_DONE
