"""Files of token ids: ours and other programs', all mapped into memory."""
