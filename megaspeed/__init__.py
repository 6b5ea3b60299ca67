"""megaspeed pretrains GPT models on DeepSpeed with three parallel axes in any combination.

The axes are `pp` (pipeline), `dp` (data, with ZeRO stages 0 to 3) and `tp` (tensor). Any layout of
ranks trains the same model as one process. Each folder imports only from the folders above it:

    config/           the JSON of a run, strictly checked
    topology/         ranks, coordinates and process groups
    data/             corpus, tokenizer, sampler, loader
    model/            the GPT as plain torch.nn, nothing distributed
    tensor_parallel/  layers split over tp, and the plan that applies them to the model
    pipeline/         schedules as data, the partition of layers, the executor
    zero/             the fence round DeepSpeed
    training/         optimizer groups, learning rate, the loop, metrics
    checkpoint/       checkpoints that know nothing of the layout
    analysis/         memory, traffic and pipeline bubble, predicted and measured
    cli/              the `megaspeed` command, a file for each subcommand
"""

__version__ = "0.2.0"
