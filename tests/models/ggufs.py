"""A tiny Llama in a GGUF file, written as llama.cpp lays it out."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np

from tests.tiny import EOS, PAD, tiny_bpe_tokenizer, tiny_causal_lm

LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
HIDDEN = 32  # blocks of quantized weights are 32 long


def write_gguf(file: Path, *, tied: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Writes model, byte-pair tokenizer and chat template; returns the weights by transformers' names, as they are
    after their quantization: 8 bits for what the MLP reads, floats for the rest."""
    tokenizer = tiny_bpe_tokenizer()
    model = tiny_causal_lm("llama", tied=tied, vocab_size=len(tokenizer), hidden=HIDDEN, seed=seed)
    config, state = model.config, {name: p.detach().numpy() for name, p in model.named_parameters()}
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(len(tokenizer))
    add_tokenizer(writer, tokenizer)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"} | ({} if tied else {"output": "lm_head"})
    for number in range(config.num_hidden_layers):
        names |= {f"blk.{number}.{ours}": f"model.layers.{number}.{theirs}" for ours, theirs in LAYER.items()}
    for ours, theirs in names.items():
        weight = state[f"{theirs}.weight"]
        if ours.endswith(("ffn_gate", "ffn_up")):
            blocks = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            state[f"{theirs}.weight"] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{ours}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
            count = heads.get(ours.rpartition(".")[2])
            writer.add_tensor(f"{ours}.weight", weight if count is None else interleaved(weight, count))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer) -> None:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = set(tokenizer.all_special_tokens)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([word for word, _ in words])
    writer.add_token_types([kinds[word in special] for word, _ in words])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_chat_template(tokenizer.chat_template)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries and keys in llama.cpp's order: the two halves of each head's rotation alternate."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.transpose(0, 2, 1, 3).reshape(rows, columns))
