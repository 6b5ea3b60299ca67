"""What a trained model does with text: continues it, and how well it predicts it."""
