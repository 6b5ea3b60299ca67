"""The folder that a run writes to: found usable before anything starts, and never overwritten."""

import json
import os
from pathlib import Path

from megaspeed.config import ConfigError, Run

CONFIG, METRICS, LOSS_CURVE = "config.json", "metrics.jsonl", "loss.png"


def check_run_folder(run: Run) -> None:
    """Raises ConfigError where ``training.run_dir`` is no folder or cannot be written to."""
    problem = folder_problem("training.run_dir", run.run_dir)
    if problem is not None:
        raise ConfigError([problem], where=run.name)


def folder_problem(name: str, folder: Path) -> str | None:
    """Why ``folder``, given as ``name``, cannot be made or written to; None where it can."""
    # os.path.exists: Path.exists raises below a folder that this user may not enter.
    whole = folder.absolute()
    existing = next(path for path in (whole, *whole.parents) if os.path.exists(path))
    if not existing.is_dir():
        problem = f"{name} {folder} cannot be a folder, because {existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{name} {folder} cannot be written to: {existing} forbids it"
    else:
        return None
    return f"{problem}; name another folder"


def open_run_folder(run: Run) -> Path | None:
    """Makes the folder and writes the resolved configuration; for one rank.

    Returns:
        Where an earlier run's files were moved, a folder inside this one; None if there were none.
    """
    run.run_dir.mkdir(parents=True, exist_ok=True)
    moved = _move_earlier_run(run.run_dir)
    text = json.dumps(run.as_json(), indent=2) + "\n"
    (run.run_dir / CONFIG).write_text(text, encoding="utf-8")
    return moved


def _move_earlier_run(folder: Path) -> Path | None:
    earlier = [folder / name for name in (CONFIG, METRICS, LOSS_CURVE) if (folder / name).exists()]
    if not earlier:
        return None
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    target = folder / f"earlier-{number}"
    target.mkdir()
    for file in earlier:
        file.rename(target / file.name)
    return target
