"""LLaMA-Factory's files: what becomes of each key, and whole runs of their examples."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import TrainingArguments

from tests.compat.llamafactory import MODEL, PPO, REWARD, RM, SFT, write_home, write_reward
from tests.models.build import save_adapter
from tests.rewards.services import Reply, local_service
from tests.rewards.value_heads import save_value_head
from tests.tiny import save_tiny, tiny_tokenizer
from tether.cli.main import main
from tether.compat import llamafactory
from tether.compat.llamafactory_keys import IGNORED, KNOWN, OFF, TAKEN
from tether.compat.load import load_any
from tether.config.launched import planned
from tether.config.load import load_config, parse_config
from tether.config.reward_stage import RewardStageConfig
from tether.config.schema import RunConfig
from tether.config.sft_stage import SftStageConfig
from tether.errors import ConfigError, ModelError
from tether.metrics.writers import read_jsonl

KEYS = Path(__file__).with_name("llamafactory_keys.txt").read_text(encoding="utf-8").split()
"""Every field of LLaMA-Factory 0.9.3's training arguments, those that it inherits from transformers 4.52 included."""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("tether.cli.main.quieten", lambda *, debug: None)
    return write_home(tmp_path)


def write(folder, text):
    path = Path(folder) / "their.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def read(text, *overrides, folder="."):
    return load_any(write(folder, text), overrides, RunConfig, "ppo")


class TestTheExample:
    def test_runs_as_it_is(self, home, capsys):
        write_reward()
        assert main(["ppo", "llama3_lora_ppo.yaml"]) == 0
        out = Path("saves/llama3-8b/lora/ppo")
        shown = capsys.readouterr().out
        assert "llama3_lora_ppo.yaml is read as" in shown and "overwrite_cache: true" in shown
        assert shown.count("warning: with sampling.top_p or top_k") == 1
        assert [row["step"] for row in read_jsonl(out / "metrics.jsonl") if "step" in row][-1] == 3  # 8 rows, 3 times
        config = json.loads((out / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["task_type"]) == (8, 16, "CAUSAL_LM")
        assert Path(config["base_model_name_or_path"]) == home / MODEL
        assert any(tensor.abs().max() > 0 for name, tensor in load_file(out / "adapter_model.safetensors").items()
                   if "lora_B" in name)  # fmt: skip
        for name in ("training_loss.png", "training_reward.png"):
            assert (out / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert "reads it: '<|start_header_id|> user <|end_header_id|> you <unk> the cat <|eot_id|>" in shown

    @pytest.mark.parametrize(("stage", "command"), [("ppo", "ppo"), ("rm", "reward"), ("sft", "sft"), ("[ppo]", "sft")])
    def test_is_no_pipeline(self, tmp_path, capsys, stage, command):
        path = write(tmp_path, f"stage: {stage}\nmodel_name_or_path: some/model\n")
        assert main(["pipeline", str(path)]) == 2
        shown = "".join(capsys.readouterr().err.split())
        assert f"`tether {command} {path}` runs it".replace(" ", "") in shown and "unknown" not in shown

    def test_becomes(self, home):
        write_reward()
        config, _ = load_any("llama3_lora_ppo.yaml", [], RunConfig, "ppo")
        by_hand = parse_config(f"""
            model: {{path: {MODEL}, trust_remote_code: true,
                     lora: {{r: 8, alpha: 16, target_modules: all-linear}}}}
            value: {{kind: head}}
            rewards: [{{type: adapter, path: {REWARD}}}]
            data: {{prompts: [identity, alpaca_en_demo], dataset_dir: data, max_samples: 1000, chat_template: llama3,
                    max_prompt_length: 2048}}
            sampling: {{response_length: 512, temperature: 0.95, top_p: 0.9, allow_truncated_sampling: true}}
            ppo: {{kl_coef: 0.2, kl_target: 6, kl_horizon: 10000, num_ppo_epochs: 4, max_ratio: 10, cliprange: 0.2,
                   cliprange_value: 0.2, vf_coef: 0.1, gamma: 1, lam: 0.95}}
            train: {{num_train_epochs: 3, rollout_batch_size: 8, micro_batch_size: 1, learning_rate: 1e-5, bf16: true,
                     lr_scheduler_type: cosine, warmup_ratio: 0.1, adam_epsilon: 1e-8, gradient_checkpointing: true,
                     logging_steps: 10, save_steps: 500, ddp_timeout: 180000000}}
            output_dir: saves/llama3-8b/lora/ppo
            overwrite_output_dir: true
        """)
        assert config == by_hand

    def test_their_defaults_where_the_file_is_silent(self, tmp_path):
        config, _ = read("stage: ppo\nmodel_name_or_path: m\nreward_model: r\ndataset: d\noutput_dir: o\n",
                         folder=tmp_path)  # fmt: skip
        assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (0.95, 0.7, 50)
        assert config.sampling.response_length == 1024 and config.data.max_prompt_length == 2048
        assert config.data.dataset_dir == "data" and config.data.chat_template == "auto"
        assert config.rewards[0].type == "value_head"  # not here: what their hub repositories hold
        train = config.train
        assert (train.rollout_batch_size, train.micro_batch_size, config.mini_batch_size) == (8, 8, 8)
        assert (train.learning_rate, train.num_train_epochs, train.lr_scheduler_type) == (5e-5, 3.0, "linear")
        assert train.bf16 is None

    def test_hub_ids_are_in_alpaca_format(self, tmp_path):
        config, _ = read(PPO, "--dataset_dir=ONLINE", "--dataset=org/a,org/b", folder=tmp_path)
        assert (config.data.prompts, config.data.dataset_dir) == (["org/a", "org/b"], "ONLINE")

    @pytest.mark.parametrize("world", [1, 2])
    def test_the_rollout_batch_is_the_product_of_four(self, tmp_path, monkeypatch, world):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        text = PPO.replace("gradient_accumulation_steps: 8", "gradient_accumulation_steps: 3\nppo_buffer_size: 4")
        config, _ = read(text.replace("train_batch_size: 1", "train_batch_size: 2"), folder=tmp_path)
        assert config.train.rollout_batch_size == 2 * 3 * 4 * world
        assert config.ppo.num_mini_batches == 4 and config.train.micro_batch_size == 2

    def test_sharding_is_said_by_the_launcher(self, tmp_path, monkeypatch):
        text = f"{PPO}\ndeepspeed: ds_z3_config.json\n"
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match="accelerate launch --use_deepspeed --deepspeed_config_file ds_z3_config"):
            read(text, folder=tmp_path)
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        _, translation = read(text, folder=tmp_path)
        (row,) = [row for row in translation.table if "deepspeed" in row[0]]
        assert "the launcher's setting" in row[1]

    def test_is_written_as_our_file_that_means_the_same(self, home):
        write_reward()
        config, translation = load_any("llama3_lora_ppo.yaml", [], RunConfig, "ppo")
        text = translation.yaml("tether ppo ours.yaml", translation.checked(RunConfig))
        Path("ours.yaml").write_text(text, encoding="utf-8")
        assert load_config("ours.yaml") == config
        assert "# ignored, data is read and tokenized anew, in this process:\n#   overwrite_cache: true, " in text


class TestRewards:
    def test_full_model_with_its_head(self, home):
        save_value_head(home)
        config, _ = read(PPO, "--reward_model=reward", "--reward_model_type=full")
        assert (config.rewards[0].type, config.rewards[0].path) == ("value_head", "reward")

    def test_adapter_on_a_model_of_its_own(self, tmp_path):
        text = f"{PPO}reward_model_type: full\nreward_model_adapters: saves/rm\n"
        config, _ = read(text, folder=tmp_path)
        assert (config.rewards[0].type, config.rewards[0].path) == ("value_head", "saves/rm")

    def test_the_adapter_is_of_the_model_that_is_named(self, home):
        save_adapter(home / "rm", Path(MODEL), reward=True)
        named = [f"--reward_model={MODEL}", "--reward_model_adapters=rm", "--reward_model_type=full"]
        assert read(PPO, *named)[0].rewards[0].path == "rm"
        save_tiny(home / "other")
        with pytest.raises(ConfigError, match=r"reward_model_adapters: .*its base is .*, not other: "):
            read(PPO, "--reward_model=other", *named[1:])

    @pytest.mark.parametrize("kind", ["lora", "api"])
    def test_adapters_of_the_other_kinds_are_not_read_as_theirs_are_not(self, tmp_path, kind):
        path = REWARD if kind == "lora" else "http://host/score"
        named = [f"--reward_model={path}", f"--reward_model_type={kind}", "--reward_model_adapters=a,b"]
        config, translation = read(PPO, *named, folder=tmp_path)
        assert path in (getattr(config.rewards[0], "path", ""), getattr(config.rewards[0], "url", ""))
        assert (
            "reward_model_adapters: a,b", "for reward_model_type full only, as in LLaMA-Factory"
        ) in translation.ignored  # fmt: skip

    @pytest.mark.parametrize(("kind", "ours"), [("lora", "adapter"), ("full", "model")])
    def test_what_tether_reward_saved(self, home, kind, ours):
        if kind == "lora":
            save_adapter(home / "rm", Path(MODEL), reward=True)
        else:
            save_tiny(home / "rm", num_labels=1)
        config, _ = read(PPO, "--reward_model=rm", f"--reward_model_type={kind}")
        assert (config.rewards[0].type, config.rewards[0].path) == (ours, "rm")

    def test_service_of_theirs(self, home):
        def lengths(payload):
            return Reply({"scores": [len(text) / 100 for text in payload["messages"]]})

        with local_service(lengths) as service:
            arguments = [f"reward_model={service.url}", "reward_model_type=api", "max_steps=1", "max_new_tokens=8"]
            assert main(["ppo", "llama3_lora_ppo.yaml", *arguments, "--plot_loss", "false"]) == 0
        assert set(service.seen[-1]) == {"model", "messages"}
        text = service.seen[-1]["messages"][0]
        assert text.startswith("<|start_header_id|> user <|end_header_id|>")  # special tokens are sent
        assert not Path("saves/llama3-8b/lora/ppo/training_loss.png").exists()

    def test_address_with_a_password_is_not_repeated(self, tmp_path):
        with pytest.raises(ConfigError, match="api_key_env") as raised:
            read(PPO, "--reward_model=http://me:secret@host/score", "--reward_model_type=api", folder=tmp_path)
        assert "secret" not in str(raised.value)


class TestKeys:
    def test_every_one_is_known_and_no_other(self):
        assert set(KEYS) == KNOWN

    def test_each_is_in_one_group(self):
        groups = [*IGNORED.values(), TAKEN]
        counts = Counter([key for names in groups for key in names.split()])
        counts.update(key for off in OFF.values() for key in off)
        assert [key for key, count in counts.items() if count > 1] == []

    @pytest.mark.parametrize("key", sorted(key for names in IGNORED.values() for key in names.split()))
    def test_what_changes_nothing_is_named(self, tmp_path, key):
        plain, _ = read(PPO.replace(f"\n{key}:", "\n# "), folder=tmp_path)
        config, translation = read(f"{PPO}{key}: 7\n" if f"\n{key}:" not in PPO else PPO, folder=tmp_path)
        assert config == plain
        assert any(theirs.startswith(f"{key}: ") and why for theirs, why in translation.ignored)

    def test_earlier_names_of_a_key_are_read_as_it(self, tmp_path):
        current = PPO + "val_size: 0.1\neval_strategy: steps\neval_steps: 5\nneftune_noise_alpha: 0\n"
        earlier = current.replace("eval_strategy", "evaluation_strategy").replace("neftune_noise_alpha", "neft_alpha")
        assert read(earlier, folder=tmp_path)[0] == read(current, folder=tmp_path)[0]
        assert read(earlier, folder=tmp_path)[0].train.eval_steps == 5
        more = "--checkpoint_dir=saves/sft"
        assert read(PPO, more, folder=tmp_path)[0].model.path == "saves/sft"
        line = earlier.splitlines().index("evaluation_strategy: steps") + 1
        with pytest.raises(ConfigError, match=f"line {line}: evaluation_strategy: got epoch; wanted steps"):
            read(earlier.replace("evaluation_strategy: steps", "evaluation_strategy: epoch"), folder=tmp_path)

    def test_a_new_adapter_on_another_is_trained_on_a_merged_model(self, tmp_path):
        adapters = "adapter_name_or_path: saves/a,saves/b\n"
        message = "create_new_adapter: got true; merge .*, `tether merge saves/a -o DIR && tether merge saves/b -o DIR`"
        with pytest.raises(ConfigError, match=message):
            read(f"{PPO}{adapters}create_new_adapter: true\n", folder=tmp_path)
        earlier = f"{PPO}checkpoint_dir: saves/a\nresume_lora_training: "
        assert read(f"{earlier}true\n", folder=tmp_path)[0].model.path == "saves/a"
        message = r"create_new_adapter \(the opposite of resume_lora_training\): got true; .* key and checkpoint_dir"
        for said in ("false", "False"):
            with pytest.raises(ConfigError, match=message):
                read(f"{earlier}{said}\n", folder=tmp_path)

    @pytest.mark.parametrize(("former", "now"), [("false", "auto"), ("true", "fa2")])
    def test_attention_was_a_truth_value(self, tmp_path, former, now):
        values = [read(f"{PPO}flash_attn: {word}\n", folder=tmp_path)[0] for word in (former, now)]
        assert values[0] == values[1]

    @pytest.mark.parametrize("stage", llamafactory.STAGES)
    def test_null_leaves_a_key_out(self, stage):
        needed = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o", "reward_model": "r"}
        given = needed | {"stage": stage, "finetuning_type": "lora"}
        for key in sorted(KNOWN - needed.keys() - {"stage"}):
            without = {name: value for name, value in given.items() if name != key}
            _, translation = llamafactory.translated("their.yaml", without | {key: None}, {})
            assert translation.config == llamafactory.translated("their.yaml", without, {})[1].config, key
            assert not any(theirs.startswith(f"{key}: ") for theirs, _ in translation.table), key

    @pytest.mark.parametrize("key", sorted(key for off in OFF.values() for key in off))
    def test_what_would_change_the_result_is_refused_by_name(self, tmp_path, key):
        with pytest.raises(ConfigError, match=rf"their.yaml, --{key}: {key}: got something; "):
            read(PPO, f"--{key}=something", folder=tmp_path)

    @pytest.mark.parametrize(
        ("override", "ours"),
        [
            ("optim=adamw_torch", {"optim": "adamw_torch"}),
            ("optim=adamw_hf", {"optim": "adamw_torch"}),
            ("optim=adamw_bnb_8bit", {"optim": "adamw_8bit"}),
            ("torch_compile=true", {"compile": True}),
            ("ddp_timeout=600", {"ddp_timeout": 600}),
        ],
    )
    def test_what_training_has_under_another_name(self, tmp_path, override, ours):
        plain, _ = read(PPO, folder=tmp_path)
        config, _ = read(PPO, f"--{override}", folder=tmp_path)
        assert config.train == plain.train.model_copy(update=ours)

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("optim=adafactor", "wanted one of adamw_torch, adamw_hf, adamw_torch_fused, adamw_8bit, "),
            ("do_sample=false", "the policy's own distribution"),
            ("num_beams=4", "the policy's own distribution"),
            ("repetition_penalty=1.2", "the policy's own distribution"),
            ("ref_model=other/model", "the reference is the policy that the run starts from"),
            ("adapter_name_or_path=a,b", "merge the others"),
            ("finetuning_type=oft", "wanted lora, freeze or full"),
            ("save_strategy=epoch", "wanted steps"),
            ("save_steps=0.1", "without max_steps the number of steps in this share is unknown: write whole steps"),
            ("flash_attn=fa3", "wanted auto, disabled, sdpa or fa2"),
            ("val_size=100", "below 1"),
            ("load_best_model_at_end=true", "the last policy is kept"),
            ("early_stopping_steps=2", "the last policy is kept"),
            ("reward_model_type=gguf", "wanted lora, full or api"),
            ("per_device_train_batch_size=two", "wanted a number"),
            ("cutoff_length=7", "LLaMA-Factory has no such key; did you mean cutoff_len?"),
            ("max_source_length=512", "it is called cutoff_len now"),
            ("output_dir=null", "missing; wanted a folder"),
            ("dataset=null", "missing; wanted names of datasets"),
            ("reward_model=null", "missing; wanted the folder of a reward model"),
            ("dataset_dir=REMOTE:someone/data", "download the repository"),
        ],
    )
    def test_mistakes_are_told_in_their_words(self, tmp_path, override, message):
        key = override.partition("=")[0]
        with pytest.raises(ConfigError, match=rf"their.yaml, --{key}: {key}: .*{message}"):
            read(PPO, f"--{override}", folder=tmp_path)

    def test_all_mistakes_at_once_with_their_lines(self, tmp_path):
        text = PPO.replace("lora_rank: 8", "lora_rank: 8\nuse_dora: true\nuse_galore: true")
        with pytest.raises(ConfigError) as raised:
            read(text, folder=tmp_path)
        lines = str(raised.value).splitlines()
        number = text.splitlines().index("use_dora: true") + 1
        assert lines[0].endswith("2 problems")
        assert any(line.startswith(f"  line {number}: use_dora: got true; ") for line in lines[1:])

    def test_a_value_that_does_not_fit_ours_names_theirs(self, tmp_path):
        with pytest.raises(ConfigError, match=r"--lr_scheduler_type, .* train.lr_scheduler_type: got x"):
            read(PPO, "--lr_scheduler_type=x", folder=tmp_path)

    def test_keys_of_hubs_and_trackers_are_shown_nowhere(self, tmp_path):
        text = f"{PPO}hf_hub_token: hf_abcdef\nswanlab_api_key: xyz123\nswanlab_lark_webhook_url: https://hook/9\n"
        config, translation = read(text, folder=tmp_path)
        shown = f"{translation.table}{translation.yaml('', config)}"
        assert "hf_hub_token: …" in shown
        assert not any(secret in shown for secret in ("hf_abcdef", "xyz123", "hook/9"))

    def test_the_policy_is_pushed_where_they_say(self, tmp_path):
        more = ["--push_to_hub=true", "--hub_model_id=me/policy", "--hub_private_repo=true"]
        train = read(PPO, *more, folder=tmp_path)[0].train
        assert (train.push_to_hub, train.hub_model_id, train.hub_private_repo) == (True, "me/policy", True)
        assert not read(PPO, "--push_to_hub=false", folder=tmp_path)[0].train.push_to_hub

    def test_what_is_planned_for_several_processes_is_what_they_would_train_on(self, tmp_path, monkeypatch):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        alone, _ = read(PPO, folder=tmp_path)
        with planned(8):
            config, _ = read(PPO, folder=tmp_path)
        assert config.train.rollout_batch_size == 8 * alone.train.rollout_batch_size
        assert read(PPO, folder=tmp_path)[0] == alone

    def test_ours_reach_a_file_of_theirs(self, tmp_path):
        config, _ = read(PPO, "--ppo.kl_coef=0.3", "--resume=true", "--learning_rate", "2e-5", folder=tmp_path)
        assert (config.ppo.kl_coef, config.resume, config.train.learning_rate) == (0.3, True, 2e-5)

    @pytest.mark.parametrize(
        ("steps", "ratio", "warmup"),
        [("20", "0.1", (20, 0.0)), ("20", "0", (20, 0.0)), ("0", "0.1", (None, 0.1)), ("0.2", "0.1", (None, 0.2)),
         ("20.0", "0", (20, 0.0)), ("0", "0", (None, 0.0))],
    )  # fmt: skip
    @pytest.mark.parametrize("stage", ["ppo", "sft"])
    def test_warm_up_is_resolved_as_transformers_does(self, tmp_path, stage, steps, ratio, warmup):
        """Over epochs, so that the number of steps in the run is not known before the data is read."""
        text, section = {"ppo": (PPO, RunConfig), "sft": (SFT, SftStageConfig)}[stage]
        given = [f"--warmup_steps={steps}", f"--warmup_ratio={ratio}"]
        (tmp_path / "warm.yaml").write_text(text)
        config, _ = load_any(tmp_path / "warm.yaml", given, section, stage)
        assert (config.train.warmup_steps, config.train.warmup_ratio) == warmup
        theirs = TrainingArguments(output_dir="o", warmup_steps=float(steps) or float(ratio), use_cpu=True)
        ours = config.train.warmup_steps or math.ceil(config.train.warmup_ratio * 500)
        assert config.train.num_train_epochs is not None and ours == theirs.get_warmup_steps(500)

    def test_mapped_keys(self, tmp_path):
        text = f"{PPO}ppo_score_norm: true\nppo_whiten_rewards: true\nppo_epochs: 2\nppo_target: 3.5\nlora_alpha: 7\n"
        overrides = ["--lora_target=q_proj,v_proj", "--max_steps=40"]
        more = ["--eval_dataset=identity", "--eval_strategy=steps", "--eval_steps=5", "--flash_attn=sdpa"]
        config, _ = read(text, *overrides, *more, "--default_system=be kind", folder=tmp_path)
        assert config.ppo.score_norm == "running" and config.ppo.whiten_rewards
        assert (config.ppo.num_ppo_epochs, config.ppo.kl_target) == (2, 3.5)
        assert (config.model.lora.alpha, config.model.lora.target_modules) == (7, ["q_proj", "v_proj"])
        assert (config.train.max_steps, config.train.num_train_epochs) == (40, None)
        assert (config.data.eval_prompts, config.train.eval_steps) == (["identity"], 5)
        assert (config.model.attn_implementation, config.data.system_prompt) == ("sdpa", "be kind")

    @pytest.mark.parametrize("section", [RunConfig, SftStageConfig])
    def test_shares_of_a_run_become_steps_where_its_length_is_known(self, tmp_path, section):
        text, command = (PPO, "ppo") if section is RunConfig else (SFT, "sft")
        shares = ["--max_steps=25", "--save_steps=0.1", "--logging_steps=0.5", "--eval_steps=0.2"]
        held_out = ["--val_size=0.5", "--eval_strategy=steps"]
        train = load_any(write(tmp_path, text), [*shares, *held_out], section, command)[0].train
        assert (train.save_steps, train.eval_steps) == (3, 5)
        assert section is SftStageConfig or train.logging_steps == 13
        train = load_any(write(tmp_path, text), [*shares[:3], *held_out], section, command)[0].train
        assert train.eval_steps == 13  # without eval_steps it is logging_steps, as in transformers

    @pytest.mark.parametrize(("text", "section", "command"), [(PPO, RunConfig, "ppo"), (SFT, SftStageConfig, "sft")])
    def test_evaluations_by_epochs_are_refused_where_something_is_held_out(self, tmp_path, text, section, command):
        with pytest.raises(ConfigError, match="eval_strategy: got epoch; wanted steps, with eval_steps, or no"):
            load_any(write(tmp_path, text), ["--eval_strategy=epoch", "--val_size=0.1"], section, command)
        assert load_any(write(tmp_path, text), ["--eval_strategy=no", "--val_size=0.1"], section, command)

    def test_swanlabs_name_of_the_run_is_its_name(self, tmp_path):
        config, _ = read(PPO, "--swanlab_run_name=mine", folder=tmp_path)
        assert config.train.run_name == "mine"
        config, translation = read(PPO, "--swanlab_run_name=mine", "--run_name=ours", folder=tmp_path)
        assert config.train.run_name == "ours"
        assert ("swanlab_run_name: mine", "run_name takes precedence") in translation.ignored
        _, translation = read(PPO, "--swanlab_project=p", folder=tmp_path)
        assert any(key == "swanlab_project: p" and "SWANLAB_PROJECT" in why for key, why in translation.ignored)

    def test_filters_that_are_off_need_no_leave(self, tmp_path):
        config, translation = read(PPO, "--top_p=1.0", folder=tmp_path)
        assert not config.sampling.is_truncated and not config.sampling.allow_truncated_sampling
        assert ("top_k: 0", "every token can be drawn, as by default here") in translation.became


class TestModels:
    def test_freeze_counts_from_the_other_end(self, home):
        write_reward()
        config, _ = read(PPO, "--finetuning_type=freeze", "--freeze_trainable_layers=1", "--reward_model_type=full")
        assert config.model.freeze_layers == 1 and config.model.lora is None  # of two
        with pytest.raises(ConfigError, match="freeze_extra_modules: got norm; only whole layers, the last ones"):
            read(PPO, "--finetuning_type=freeze", "--freeze_extra_modules=norm", "--reward_model_type=full")

    def test_fp16(self, tmp_path):
        train = read(PPO.replace("bf16: true", "fp16: true"), folder=tmp_path)[0].train
        assert (train.bf16, train.fp16) == (None, True)

    def test_full(self, tmp_path):
        config, _ = read(PPO, "--finetuning_type=full", "--reward_model_type=full", "--pure_bf16=true", folder=tmp_path)
        assert config.model.lora is None and config.model.dtype == "bfloat16"

    def test_an_adapter_is_continued_on_its_base(self, home):
        save_adapter(home / "sft", Path(MODEL), tokenizer=True)
        config, translation = read(PPO, "--adapter_name_or_path=sft")
        assert config.model.path == "sft" and config.model.lora.model_fields_set == set()
        assert any("The reference is the adapter" in note for note in translation.notes)
        with pytest.raises(ConfigError, match=r"adapter_name_or_path: .*its base is .*, not other/model"):
            read(PPO, "--adapter_name_or_path=sft", "--model_name_or_path=other/model")

    def test_a_template_that_has_no_name_here_is_the_models_own_or_refused(self, home):
        config, _ = read(PPO, "--template=deepseek3")
        assert config.data.chat_template == "auto"
        save_tiny(home / "bare", chat_template=False)
        with pytest.raises(ConfigError, match=r"template: got deepseek3; wanted one of .*no chat template"):
            read(PPO, "--template=deepseek3", "--model_name_or_path=bare")

    def test_the_template_of_an_adapter_that_is_continued_is_its_own(self, home):
        save_tiny(home / "bare", chat_template=False)
        save_adapter(home / "sft", home / "bare")
        tiny_tokenizer().save_pretrained(home / "sft")
        bare = [PPO, "--template=deepseek3", "--model_name_or_path=bare"]
        assert read(*bare, "--adapter_name_or_path=sft")[0].data.chat_template == "auto"
        (home / "sft" / "chat_template.jinja").unlink()
        with pytest.raises(ConfigError, match=r"template: got deepseek3; wanted one of .*no chat template"):
            read(PPO, "--template=deepseek3", "--adapter_name_or_path=sft", "--model_name_or_path=bare")

    def test_the_template_is_that_of_the_revision_that_is_loaded(self, home, monkeypatch):
        asked = []

        def load_tokenizer(path, **origin):
            asked.append((path, origin))
            return tiny_tokenizer()

        monkeypatch.setattr("tether.models.tokenizer.load_tokenizer", load_tokenizer)
        read(PPO, "--template=deepseek3", "--model_revision=v2")
        assert asked == [(MODEL, {"revision": "v2", "trust_remote_code": True})]

    def test_a_template_that_llamafactory_has_not_is_a_slip(self, home):
        for slip, told in (("lama3", "did you mean llama3?"), ("qwen25_vl", "did you mean qwen2_vl?"), ("xyz", "")):
            with pytest.raises(ConfigError, match=rf"template: got {slip}; LLaMA-Factory has no such template; {told}"):
                read(PPO, f"--template={slip}")

    def test_a_system_prompt_of_the_file_stands_in_for_the_templates_own(self, home):
        assert read(PPO, "--template=zephyr")[0].data.system_prompt is None
        assert read(PPO, "--template=zephyr", "--default_system=x")[0].data.system_prompt == "x"

    def test_flash_attention_is_used_where_it_can_be(self, tmp_path, monkeypatch):
        for installed, wanted in ((True, "flash_attention_2"), (False, None)):
            monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda has=installed: has)
            config, translation = read(PPO, "--flash_attn=fa2", folder=tmp_path)
            assert config.model.attn_implementation == wanted
            assert any("cannot be used here" in note for note in translation.notes) is not installed

    def test_quantized(self, tmp_path):
        overrides = ["--quantization_bit=4", "--ref_model_quantization_bit=4"]
        config, translation = read(PPO, *overrides, folder=tmp_path)
        assert config.model.quantization == "4bit"
        assert any(theirs == "ref_model_quantization_bit: 4" for theirs, _ in translation.ignored)
        with pytest.raises(ConfigError, match="quantization_bit: got 3; wanted 4 or 8"):
            read(PPO, "--quantization_bit=3", folder=tmp_path)
        config, _ = read(PPO, "--reward_model_quantization_bit=8", "--reward_model_type=full", folder=tmp_path)
        assert config.rewards[0].quantization == "8bit"


class TestOtherStages:
    """The files of the stages before, one after the other, in the folders that they name."""

    def test_run_as_they_are_and_the_judge_serves_ppo(self, home, capsys):
        assert main(["sft", "llama3_lora_sft.yaml"]) == 0
        assert main(["reward", "llama3_lora_reward.yaml", "val_size=0.5"]) == 0
        for folder, task in (("saves/llama3-8b/lora/sft", "CAUSAL_LM"), (REWARD, "SEQ_CLS")):
            config = json.loads((home / folder / "adapter_config.json").read_text())
            assert (config["r"], config["lora_alpha"], config["task_type"]) == (8, 16, task)
            assert (home / folder / "training_loss.png").is_file() and (home / folder / "README.md").is_file()
        assert "accuracy" in capsys.readouterr().out
        options = ["max_steps=1", "max_new_tokens=4", "adapter_name_or_path=saves/llama3-8b/lora/sft"]
        assert main(["ppo", "llama3_lora_ppo.yaml", *options]) == 0
        assert "type: adapter" in Path("saves/llama3-8b/lora/ppo/config.yaml").read_text()

    def test_become(self, tmp_path):
        config, _ = load_any(write(tmp_path, SFT), ["--mask_history=true"], SftStageConfig, "sft")
        assert (config.data.demonstrations, config.data.turns) == (["identity", "alpaca_en_demo"], "last")
        assert (config.data.max_length, config.data.max_samples) == (2048, 1000)
        train = config.train
        assert (train.batch_size, train.micro_batch_size, train.num_train_epochs) == (8, 1, 3)
        assert (train.learning_rate, train.lr_scheduler_type, train.warmup_ratio) == (1e-4, "cosine", 0.1)
        assert (train.save_steps, train.save_total_limit) == (500, None)
        judge, _ = load_any(write(tmp_path, RM), [], RewardStageConfig, "reward")
        assert judge.data.pairs == ["dpo_en_demo"] and judge.data.held_out_fraction == 0.0

    @pytest.mark.parametrize(
        "override",
        [
            *("optim=adamw_8bit", "packing=true", "train_on_prompt=true", "disable_shuffling=true"),
            *("quantization_bit=4", "finetuning_type=freeze"),
        ],
    )
    def test_refuse_by_name(self, tmp_path, override):
        key, _, value = override.partition("=")
        with pytest.raises(ConfigError, match=f"{key}: got {value}; "):
            load_any(write(tmp_path, SFT), [f"--{override}"], SftStageConfig, "sft")

    @pytest.mark.parametrize(
        ("text", "section", "command"), [(SFT, SftStageConfig, "sft"), (RM, RewardStageConfig, "reward")]
    )
    def test_tell_their_trackers_and_evaluate_on_the_way(self, tmp_path, text, section, command):
        told = ["--report_to=wandb", "--use_swanlab=true", "--run_name=mine"]
        evaluated = ["--val_size=0.2", "--eval_strategy=steps", "--eval_steps=7"]
        train = load_any(write(tmp_path, text), [*told, *evaluated], section, command)[0].train
        assert (train.report_to, train.run_name, train.eval_steps) == (["wandb", "swanlab"], "mine", 7)

    @pytest.mark.parametrize(
        ("given", "ours"),
        [
            (["load_best_model_at_end=true"], ("eval_loss", None, True, None)),
            (["early_stopping_steps=3"], ("eval_loss", None, False, 3)),
            (["load_best_model_at_end=false", "metric_for_best_model=loss"], (None, None, False, None)),
            (["load_best_model_at_end=true", "metric_for_best_model=loss", "greater_is_better=false"],
             ("eval_loss", False, True, None)),
            (["load_best_model_at_end=true", "metric_for_best_model=eval_accuracy"], ("accuracy", None, True, None)),
        ],
    )
    @pytest.mark.parametrize(
        ("text", "section", "command", "accuracy"),
        [(SFT, SftStageConfig, "sft", "eval_mean_token_accuracy"), (RM, RewardStageConfig, "reward", "eval_accuracy")],
    )
    def test_keep_their_best_model(self, tmp_path, given, ours, text, section, command, accuracy):
        evaluated = ["--val_size=0.2", "--eval_strategy=steps", "--eval_steps=500"]
        told = [*evaluated, *(f"--{each}" for each in given)]
        train = load_any(write(tmp_path, text), told, section, command)[0].train
        metric = accuracy if ours[0] == "accuracy" else ours[0]
        found = train.metric_for_best_model, train.greater_is_better, train.load_best_model_at_end
        assert (*found, train.early_stopping_patience) == (metric, *ours[1:])

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (["metric_for_best_model=rouge-1"], "got eval_rouge-1, wanted one of eval_loss"),
            (["val_size=0"], r"needs data\.eval_demonstrations or data\.eval_fraction"),
            (["early_stopping_steps=few"], "early_stopping_patience"),
        ],
    )
    def test_tell_what_cannot_choose_a_model(self, tmp_path, given, message):
        told = ["--load_best_model_at_end=true", "--val_size=0.2", "--eval_strategy=steps", "--eval_steps=5"]
        with pytest.raises(ConfigError, match=message):
            load_any(write(tmp_path, SFT), [*told, *(f"--{each}" for each in given)], SftStageConfig, "sft")

    def test_share_rows_and_no_weights(self, tmp_path, monkeypatch):
        """Their batch is of each device; what they say of DeepSpeed changes nothing on one."""
        named = ["--deepspeed=ds_z3_config.json"]
        assert load_any(write(tmp_path, SFT), named, SftStageConfig, "sft")[0].train.batch_size == 8
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert load_any(write(tmp_path, SFT), [], SftStageConfig, "sft")[0].train.batch_size == 16
        with pytest.raises(ConfigError, match=r"deepspeed: .*accelerate launch --use_deepspeed .* -m tether sft"):
            load_any(write(tmp_path, SFT), named, SftStageConfig, "sft")


class TestRecognition:
    def test_a_stage_of_another_command_is_sent_there(self, home, capsys):
        assert main(["ppo", "llama3_lora_sft.yaml"]) == 2
        assert "stage sft is run by `tether sft llama3_lora_sft.yaml`" in capsys.readouterr().err

    def test_stages_that_tether_has_not(self, tmp_path):
        with pytest.raises(ConfigError, match="stage: got dpo; Tether has the stages ppo, sft, rm"):
            read(PPO.replace("stage: ppo", "stage: dpo"), folder=tmp_path)

    def test_our_own_files_are_read_as_before(self, tmp_path):
        text = "model: {path: m}\nrewards: [{type: regex, pattern: x}]\ndata: {prompts: p}\ntrain: {max_steps: 1}\n"
        config, translation = read(f"{text}output_dir: o\n", folder=tmp_path)
        assert translation is None and config.model.path == "m"
        with pytest.raises(ConfigError, match="line 1: stage: unknown key"):
            read(f"stage: ppo\n{text}output_dir: o\n", folder=tmp_path)


class TestValuesOfOtherKinds:
    def test_a_list_or_a_group_where_one_value_is_wanted_is_named(self, home):
        wrong = PPO.replace("stage: ppo\n", "stage: [ppo]\n")
        with pytest.raises(ConfigError, match=r"line 1: stage: got \['ppo'\]; Tether has the stages ppo, sft, rm"):
            read(wrong)
        wrong = PPO.replace("template: llama3", "template: [llama3]").replace("lora_target: all", "lora_target: {a: b}")
        with pytest.raises(ConfigError) as raised:
            read(wrong.replace("bf16: true", "bf16: [true]"))
        assert [line.split(": ", 1)[1] for line in str(raised.value).splitlines()[1:]] == [
            "lora_target: got {a: b}; wanted names",
            "template: got [llama3]; wanted one value",
            "bf16: got [true]; wanted one value",
        ]

    def test_words_for_true_and_false_are_read_as_their_yaml_reads_them(self, home):
        words = PPO.replace("trust_remote_code: true", "trust_remote_code: no").replace("bf16: true", "bf16: Yes")
        words = words.replace("overwrite_output_dir: true", "overwrite_output_dir: off") + "use_galore: no\n"
        config, _ = read(words + "ppo_score_norm: on\n")
        assert not config.model.trust_remote_code and not config.overwrite_output_dir
        assert config.train.bf16 is True and config.ppo.score_norm == "running"
        with pytest.raises(ConfigError, match="trust_remote_code: got maybe; wanted true or false"):
            read(PPO.replace("trust_remote_code: true", "trust_remote_code: maybe"))

    def test_one_mistake_is_told_once(self, home):
        with pytest.raises(ConfigError, match=r"their.yaml, line \d+: val_size: got x; wanted a number$"):
            read(PPO + "val_size: x\n")

    def test_a_missing_model_is_named_where_its_template_is_looked_for(self, home):
        text = PPO.replace(MODEL, "./nowhere")
        for odd in (text.replace("template: llama3", "template: yi"), text.replace("type: lora", "type: freeze")):
            with pytest.raises(ModelError, match=r"model_name_or_path: \./nowhere does not exist; wanted"):
                read(odd)

    def test_paths_at_home(self, home, monkeypatch):
        monkeypatch.setenv("HOME", str(home))
        config, _ = read(PPO.replace(MODEL, f"~/{MODEL}").replace("template: llama3", "template: yi"))
        assert Path(config.model.path) == home / MODEL
