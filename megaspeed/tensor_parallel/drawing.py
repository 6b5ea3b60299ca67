"""Draw the next token from softmax(z / T), where each rank has some columns of the logits z.

    score_i = z_i / T - log(-log(u_i))     u_i uniform in (0, 1); the largest score is drawn

This is the Gumbel-max trick (Maddison et al. 2014, "A* sampling", section 2). u_i is a hash of the
key, the prompt and the token id. So a rank computes the scores of its own columns, and every layout
draws the same token, unless the two largest scores differ by no more than rounding.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megaspeed.model.dropout import row_words
from megaspeed.tensor_parallel.collectives import TensorAxis, start_all_gather


class Draw(NamedTuple):
    """How the next token of each prompt is drawn."""

    key: Tensor  # of the random numbers: int64 scalar on the CPU
    temperature: float  # T; 0: nothing is drawn, and scores are logits
    # The k tokens with the largest logits can be drawn (Fan et al. 2018), and those with the same
    # logit as the last of them; None: all.
    top_k: int | None = None

    def scores(self, z: Tensor, ids: range, prompts: Tensor, axis: TensorAxis) -> Tensor:
        """The scores (B, columns) in fp64 of this rank's logits z of the tokens ``ids``.

        Row b is that of prompt ``prompts[b]``. All ranks of the tensor axis call this together.
        """
        if self.temperature == 0:
            return z
        if self.top_k is not None:
            best = z.topk(min(self.top_k, len(ids))).values
            if axis.size > 1:
                best = start_all_gather(best.t(), axis).wait().t()  # (B, tp k)
            best = best.topk(min(self.top_k, best.shape[1])).values
            z = z.masked_fill(z < best[:, -1:], -math.inf)
        columns = torch.arange(ids.start, ids.stop, device=z.device)
        words = row_words(self.key, prompts, columns, full_rows=2**32)
        uniform = (((words >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52  # exact, so never 1
        return z / self.temperature - uniform.log().neg().log()
