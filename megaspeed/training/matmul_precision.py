"""How exactly a GPU multiplies matrices: process-wide switches of torch, set from the JSON.

    training.allow_tf32                           fp32 products in TF32 (10 mantissa bits)
    training.allow_reduced_precision_reduction    bf16 and fp16 products whose partial sums, where
                                                  cuBLAS splits the inner dim, are bf16 or fp16

Both are false by default: layouts split a product in different places, so only exact sums let them
agree. torch's own default for the second is true. nanoGPT and litgpt turn TF32 on.
Source: https://docs.pytorch.org/docs/stable/notes/cuda.html, "TensorFloat-32" and the two sections
after it.
"""

import torch

from megaspeed.config.training import TrainingConfig


def set_matmul_precision(training: TrainingConfig, device: torch.device) -> None:
    """Sets this process's switches; does nothing on a CPU, which sums fp32 in fp32."""
    if device.type != "cuda":
        return
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = training.allow_tf32
    matmul.allow_bf16_reduced_precision_reduction = training.allow_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = training.allow_reduced_precision_reduction
