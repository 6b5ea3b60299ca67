"""The keys of two small config.json files of Hugging Face."""

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 301,
    "n_embd": 96,
    "n_layer": 4,
    "n_head": 12,
    "n_positions": 64,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 301,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
