"""A script of the shape that TRL's users have: full models, the last rows held out, no stop token."""

import shutil
from dataclasses import dataclass, field

from accelerate import PartialState
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser

from tether.compat.trl import PPOConfig, PPOTrainer


@dataclass
class Arguments:
    """The script's own arguments."""

    dataset_name: str = field(metadata={"help": "Folder of the prompts."})
    held_out: int = field(default=4, metadata={"help": "Rows at the end that are held out."})


if __name__ == "__main__":
    script_args, training_args = HfArgumentParser((Arguments, PPOConfig)).parse_args_into_dataclasses()
    shutil.rmtree(training_args.output_dir, ignore_errors=True)

    tokenizer = AutoTokenizer.from_pretrained(training_args.sft_model_path, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    value_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    reward_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)
    ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path)

    dataset = load_dataset(script_args.dataset_name, split="train")
    kept = len(dataset) - script_args.held_out

    def tokenized(data):
        return data.map(
            lambda rows: {"input_ids": tokenizer(rows["prompt"], padding=False)["input_ids"]},
            batched=True,
            remove_columns=data.column_names,
            num_proc=training_args.dataset_num_proc,
        )

    with PartialState().local_main_process_first():
        train_dataset = tokenized(dataset.select(range(kept)))
        eval_dataset = tokenized(dataset.select(range(kept, len(dataset))))

    trainer = PPOTrainer(
        args=training_args,
        processing_class=tokenizer,
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    trainer.generate_completions()
