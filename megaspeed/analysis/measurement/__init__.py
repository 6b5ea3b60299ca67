"""What a run really holds and sends, counted while it trains."""
