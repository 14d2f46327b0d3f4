"""Write a small Llama of random weights to the folder small-llama; it stands in for your checkpoint."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

if __name__ == "__main__":
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained("small-llama")
