"""A script of the shape that TRL's users have: LoRA, answers that end, long prompts filtered out, pushed at the end."""

import shutil
from dataclasses import dataclass, field

from accelerate import PartialState
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser

from tether.compat.trl import PPOConfig, PPOTrainer


@dataclass
class Arguments:
    """The script's own arguments."""

    dataset_name: str = field(metadata={"help": "Folder of the prompts."})
    use_peft: bool = field(default=False, metadata={"help": "Train an adapter."})


if __name__ == "__main__":
    script_args, training_args = HfArgumentParser((Arguments, PPOConfig)).parse_args_into_dataclasses()
    shutil.rmtree(training_args.output_dir, ignore_errors=True)

    tokenizer = AutoTokenizer.from_pretrained(training_args.sft_model_path, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    value_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    reward_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
    peft_config = None
    if script_args.use_peft:
        peft_config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    def tokenized(row):
        input_ids = tokenizer(row["prompt"], padding=False)["input_ids"]
        return {"input_ids": input_ids, "lengths": len(input_ids)}

    dataset = load_dataset(script_args.dataset_name)
    with PartialState().local_main_process_first():
        splits = {
            name: dataset[name]
            .map(tokenized, remove_columns=dataset[name].column_names)
            .filter(lambda row: row["lengths"] <= 4)
            for name in ("train", "validation")
        }
    assert splits["train"][0]["input_ids"][-1] != tokenizer.eos_token_id

    trainer = PPOTrainer(
        args=training_args,
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=splits["train"],
        eval_dataset=splits["validation"],
        peft_config=peft_config,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.generate_completions()
    if trainer.accelerator.is_main_process:
        print("episodes", trainer.state.episode)
