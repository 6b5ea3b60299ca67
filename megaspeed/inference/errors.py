"""The one error of inference: what the model gave, where nothing can be made of it."""


class InferenceError(RuntimeError):
    """A model's answer cannot be used."""
