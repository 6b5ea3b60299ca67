"""megaspeed from Python, cell by cell; run it in a notebook, or with ``python examples/api.py``.

It trains a tiny GPT on this machine's CPU or GPU in less than a minute, without a launcher.
"""

# %% The configuration: one JSON file, and changes of single keys

import json
import tempfile
from pathlib import Path

import megaspeed

folder = Path(tempfile.mkdtemp())
config = folder / "tiny.json"
config.write_text(
    json.dumps(
        {
            "model": {"preset": "gpt2-nano"},
            # Any text files. Here they are those of Python's json package.
            "data": {"train": [f"{Path(json.__file__).parent}/*.py"], "sequence_length": 64},
            "training": {"steps": 20, "log_interval": 5, "run_dir": str(folder / "run")},
            "train_batch_size": 8,
        }
    )
)
run = megaspeed.load_config(config, overrides={"optimizer.params.lr": 0.002})
print(run.model.hidden_size, run.optimizer.params.lr)

# %% What the run needs on 8 processes: the figures of ``megaspeed plan --json``

figures = megaspeed.plan(config, world_size=8, overrides=["zero_optimization.stage=2"])
for stage in figures["pipeline_stages"]:
    print(stage)

# %% Train in this process

run_dir = megaspeed.train(config, overrides={"optimizer.params.lr": 0.002})

# %% What the run has recorded

records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
print([round(record["loss"], 3) for record in records if "loss" in record])

# %% Train with 2 processes: the run resumes from its checkpoint

megaspeed.train(
    config,
    overrides={"optimizer.params.lr": 0.002, "training.steps": 30},
    world_size=2,
)
