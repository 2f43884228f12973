"""A folder as LLaMA-Factory's users have it, and their example files, all names as theirs; models and data are tiny."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from tests.models.build import save_adapter
from tests.rewards.value_heads import HEAD
from tests.tiny import BOS, EOS, tiny_causal_lm, tiny_tokenizer

MODEL = "meta-llama/Meta-Llama-3-8B-Instruct"
REWARD = "saves/llama3-8b/lora/reward"

_SHARED = f"""\
### model
model_name_or_path: {MODEL}
trust_remote_code: true

### method
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all

### dataset
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4

### output
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none  # choices: [none, wandb, tensorboard, swanlab, mlflow]

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
"""
PPO = f"""\
stage: ppo
reward_model: {REWARD}
dataset: identity,alpaca_en_demo
output_dir: saves/llama3-8b/lora/ppo
learning_rate: 1.0e-5
max_new_tokens: 512
top_k: 0
top_p: 0.9
{_SHARED}"""
SFT = f"""\
stage: sft
dataset: identity,alpaca_en_demo
output_dir: saves/llama3-8b/lora/sft
learning_rate: 1.0e-4
resume_from_checkpoint: null
{_SHARED}
### eval
# eval_dataset: alpaca_en_demo
# val_size: 0.1
# eval_strategy: steps
"""
RM = f"""\
stage: rm
dataset: dpo_en_demo
output_dir: {REWARD}
learning_rate: 1.0e-4
{_SHARED}"""

ROWS = [
    {"instruction": f"you see the {noun}", "input": more, "output": f"the {noun} is {how} {how}"}
    for noun, how, more in (("cat", "good", ""), ("dog", "nice", "it runs"), ("sun", "red", ""), ("day", "bad", ""))
]
PAIRS = [
    {
        "conversations": [{"from": "human", "value": f"you like the {noun}"}],
        "chosen": {"from": "gpt", "value": f"the {noun} is very good"},
        "rejected": {"from": "gpt", "value": f"i hate the {noun}"},
    }
    for noun in ("cat", "dog", "sun", "day")
]
INFO = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "dpo_en_demo": {
        "file_name": "dpo_en_demo.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
}


def write_home(folder: Path) -> Path:
    """Model, data and example files under ``folder``, which must be the current one."""
    tokenizer = tiny_tokenizer()
    turns = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_tokens([*turns, "user", "system", "assistant"], special_tokens=True)
    model = tiny_causal_lm("llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
    model.generation_config.update(eos_token_id=[EOS, tokenizer.convert_tokens_to_ids("<|eot_id|>")], bos_token_id=BOS)
    model.save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)
    (folder / "data").mkdir()
    files = {"identity": ROWS, "alpaca_en_demo": ROWS[::-1], "dpo_en_demo": PAIRS, "dataset_info": INFO}
    for name, content in files.items():
        (folder / "data" / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    for name, text in (("ppo", PPO), ("sft", SFT), ("reward", RM)):
        (folder / f"llama3_lora_{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def write_reward(folder: str = REWARD) -> None:
    """What their stage rm saves: an adapter of a language model, and the head in a file."""
    save_adapter(Path(folder), Path(MODEL), tokenizer=True)
    save_file(HEAD, Path(folder) / "value_head.safetensors", metadata={"format": "pt"})
