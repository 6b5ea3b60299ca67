"""What cannot be imported or exported, and what two implementations disagree in."""


class HuggingFaceError(RuntimeError):
    """A model cannot be taken in or given out; the message has the mend."""


class Disagreement(HuggingFaceError):
    """transformers and megaspeed compute different things from what should be the same model."""
