"""Launches of other systems as our YAML, and ours as theirs: by hand, and there and back."""

import json
import math
from pathlib import Path

import pytest
import yaml

from tests.compat.llamafactory import PPO, RM, SFT
from tether.cli.main import main
from tether.compat.convert import SECTIONS, convert
from tether.compat.launch import launches, options, overrides
from tether.config.load import dump_settings, load_config, parse_config
from tether.config.schema import RunConfig
from tether.errors import ConfigError

OPENRLHF_OLD = """\
set -x
# the model that is aligned
MODEL=org/sft-model
python3 -m openrlhf.cli.train_ppo_ray \\
   --ref_num_nodes 1 --vllm_num_engines 4 --colocate_all_models --zero_stage 3 --bf16 \\
   --pretrain ${MODEL} --reward_pretrain org/reward-a --critic_pretrain $MODEL \\
   --save_path out/rlhf --micro_train_batch_size 8 --train_batch_size 128 \\
   --micro_rollout_batch_size 16 --rollout_batch_size 512 --n_samples_per_prompt 2 --max_epochs 1 \\
   --prompt_max_len 700 --generate_max_len 300 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 \\
   --init_kl_coef 0.02 --kl_target 0.1 --prompt_data org/prompts --input_key question --apply_chat_template \\
   --normalize_reward --gradient_checkpointing --use_wandb 0123456789abcdef
"""
OPENRLHF_NEW = """\
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/openrlhf"}' \\
   -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.num_nodes 1 --vllm.num_engines 4 --ds.zero_stage 3 --ds.param_dtype bf16 --train.colocate_all \\
   --actor.model_name_or_path org/sft-model --reward.model_name_or_path org/reward-a \\
   --critic.model_name_or_path org/sft-model --ckpt.output_dir out/rlhf \\
   --train.micro_batch_size 8 --train.batch_size 128 --rollout.micro_batch_size 16 --rollout.batch_size 512 \\
   --rollout.n_samples_per_prompt 2 --train.max_epochs 1 --data.max_len 1000 --rollout.max_new_tokens 300 \\
   --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --algo.kl.init_coef 0.02 --algo.kl.target 0.1 \\
   --data.prompt_dataset org/prompts --data.input_key question --data.apply_chat_template \\
   --reward.normalize_enable --actor.gradient_checkpointing_enable --logger.wandb.key 0123456789abcdef
"""
OPENRLHF_OURS = """
    model: {path: org/sft-model}
    value: {kind: model, init: policy, learning_rate: 9e-6}
    rewards: [{type: model, path: org/reward-a}]
    data: {prompts: org/prompts, columns: {prompt: question}, max_prompt_length: 700}
    sampling: {response_length: 300, num_generations: 2, vllm: {}}
    ppo: {importance_sampling_cap: null,
          kl_coef: 0.02, lam: 1, num_ppo_epochs: 1, num_mini_batches: 8, cliprange_value: 0.5, reward_clip: 10}
    train: {num_train_epochs: 1, rollout_batch_size: 1024, micro_batch_size: 8, learning_rate: 5e-7, adam_beta2: 0.95,
            adam_epsilon: 1e-8, lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: 0.1},
            warmup_ratio: 0.03, bf16: true, gradient_checkpointing: true, save_total_limit: 3, report_to: [wandb]}
    output_dir: out/rlhf
"""
VERL = """\
export VLLM_ATTENTION_BACKEND=XFORMERS
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01 \\
    data.train_files="['train.parquet','more.parquet']" data.val_files=test.parquet data.train_batch_size=64 \\
    data.max_prompt_length=400 data.max_response_length=600 +data.apply_chat_template_kwargs.enable_thinking=False \\
    actor_rollout_ref.model.path=org/sft-model actor_rollout_ref.actor.optim.lr=2e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.top_k=40 \\
    critic.optim.lr=1e-5 critic.model.path=org/critic \\
    custom_reward_function.path=graded.py custom_reward_function.name=graded \\
    trainer.critic_warmup=5 trainer.logger='["console","wandb"]' trainer.save_freq=20 trainer.test_freq=10 \\
    trainer.total_epochs=15 trainer.project_name=p trainer.experiment_name=e trainer.n_gpus_per_node=8 $@
"""
VERL_OURS = """
    model: {path: org/sft-model}
    value: {kind: model, init: org/critic, learning_rate: 1e-5, warmup_steps: 5}
    rewards: [{type: function, path: graded.py, name: graded}]
    data: {prompts: [train.parquet, more.parquet], eval_prompts: test.parquet, max_prompt_length: 400,
           chat_template_kwargs: {enable_thinking: false}}
    sampling: {response_length: 600, num_generations: 2, top_k: 40, allow_truncated_sampling: true,
               vllm: {gpu_memory_utilization: 0.5, enable_sleep_mode: true}}
    ppo: {importance_sampling_cap: null,
          kl_coef: 0.01, lam: 1, num_ppo_epochs: 1, num_mini_batches: 4, cliprange: 0.2, cliprange_high: 0.28,
          dual_clip: 3, cliprange_value: 0.5, loss_reduction: fixed_length}
    train: {num_train_epochs: 15, rollout_batch_size: 128, micro_batch_size: 4, learning_rate: 2e-6, weight_decay: 0.01,
            adam_epsilon: 1e-8, lr_scheduler_type: constant_with_warmup, gradient_checkpointing: true, eval_steps: 10,
            save_steps: 20, report_to: [wandb], run_name: e}
    output_dir: checkpoints/p/e
"""
TRL = """\
accelerate launch --config_file deepspeed_zero3.yaml examples/scripts/ppo/ppo_tldr.py \\
    --dataset_name org/tldr --dataset_test_split validation --output_dir models/ppo_tldr \\
    --learning_rate 3e-6 --per_device_train_batch_size 16 --gradient_accumulation_steps 4 --total_episodes 1000000 \\
    --model_name_or_path EleutherAI/pythia-1b-deduped --sft_model_path org/tldr-sft --reward_model_path org/tldr-rm \\
    --local_rollout_forward_batch_size 16 --missing_eos_penalty 1.0 --stop_token eos --num_mini_batches 2
"""
TRL_OURS = """
    model: {path: org/tldr-sft}
    value: {kind: model}
    rewards: [{type: model, path: org/tldr-rm}]
    data: {prompts: org/tldr, chat_template: none}
    sampling: {temperature: 0.7}
    ppo: {missing_eos_penalty: 1, num_mini_batches: 2}
    train: {total_episodes: 1000000, rollout_batch_size: 64, micro_batch_size: 16, learning_rate: 3e-6,
            adam_epsilon: 1e-8, gradient_checkpointing: true, save_steps: 500}
    output_dir: models/ppo_tldr
"""
LAUNCHES = {
    "openrlhf_old": (OPENRLHF_OLD, OPENRLHF_OURS),
    "openrlhf_new": (OPENRLHF_NEW, OPENRLHF_OURS),
    "verl": (VERL, VERL_OURS),
    "trl": (TRL, TRL_OURS),
}
OURS = """\
model: {path: org/policy, trust_remote_code: true, lora: {r: 8, alpha: 16, target_modules: [q_proj, v_proj]}}
value: {kind: model, init: org/critic, learning_rate: 2.0e-05, warmup_steps: 3}
rewards: [{type: model, path: org/judge}]
data: {prompts: "odd name's.parquet", eval_prompts: held.parquet, max_prompt_length: 300, max_samples: 50,
       columns: {prompt: question}}
sampling: {response_length: 200, temperature: 0.9, num_generations: 2, top_p: 0.95, allow_truncated_sampling: true,
           vllm: {gpu_memory_utilization: 0.4, enable_sleep_mode: true, enforce_eager: true}}
ppo: {importance_sampling_cap: 3,
      kl_coef: 0.03, kl_in: loss, kl_estimator: k3, num_ppo_epochs: 2, num_mini_batches: 4, lam: 0.9, gamma: 0.99,
      cliprange: 0.1, cliprange_high: 0.3, dual_clip: 4, cliprange_value: 0.4, entropy_coef: 0.01,
      loss_reduction: sequence_mean}
train: {num_train_epochs: 2, rollout_batch_size: 64, max_tokens_per_micro_batch: 4096, learning_rate: 1.0e-05,
        lr_scheduler_type: cosine, warmup_ratio: 0.1, weight_decay: 0.02, adam_beta2: 0.99, adam_epsilon: 1.0e-08,
        max_grad_norm: 0.5, eval_steps: 7, save_steps: 9, save_total_limit: 2, seed: 5, run_name: mine,
        gradient_checkpointing: true, bf16: true}
output_dir: runs/mine
"""
KL_LOSS = "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.2"
LOST = {
    "openrlhf": {"model": {"trust_remote_code"}, "train": {"lr_scheduler_kwargs"}},
}
"""What the other system has no words for, or needs one for that we leave out."""


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def converted(path, to="tether"):
    return convert(path, to, "out").text


class TestToOurs:
    @pytest.mark.parametrize("name", LAUNCHES)
    def test_by_hand(self, tmp_path, name):
        launch, ours = LAUNCHES[name]
        text = converted(written(tmp_path, "launch.sh", launch))
        assert parse_config(text) == parse_config(ours)

    @pytest.mark.parametrize(
        ("name", "there", "instead", "bf16", "fp16"),
        [
            ("openrlhf_old", "--bf16", "--param_dtype fp16", None, True),
            ("openrlhf_old", "--bf16", "--param_dtype fp32", False, False),
            ("openrlhf_new", "--ds.param_dtype bf16", "--ds.param_dtype fp16", None, True),
            ("openrlhf_new", "--ds.param_dtype bf16", "--ds.param_dtype fp32", False, False),
            ("openrlhf_new", "--ds.param_dtype bf16", "--fsdp.param_dtype fp16", None, True),
            ("verl", "", " actor_rollout_ref.actor.fsdp_config.dtype=float16", None, True),
            ("verl", "", " actor_rollout_ref.actor.fsdp_config.dtype=fp16", None, True),
            ("verl", "", " actor_rollout_ref.actor.fsdp_config.dtype=16", None, True),
            ("verl", "", " actor_rollout_ref.actor.fsdp_config.dtype=bfloat16", True, False),
            ("verl", "", " actor_rollout_ref.actor.fsdp_config.dtype=bf16", True, False),
            ("verl", "", " actor_rollout_ref.actor.fsdp_config.dtype=float32", False, False),
        ],
    )
    def test_arithmetic_of_another_kind(self, tmp_path, name, there, instead, bf16, fp16):
        launch, ours = LAUNCHES[name]
        text = launch.replace(there, instead) if there else launch.rstrip() + instead + "\n"
        train = parse_config(converted(written(tmp_path, "launch.sh", text))).train
        assert (train.bf16, train.fp16) == (bf16, fp16)
        assert parse_config(ours).train.fp16 is False

    def test_arguments_alone_will_do(self, tmp_path):
        words = OPENRLHF_NEW.partition("train_ppo_ray \\\n")[2]
        assert parse_config(converted(written(tmp_path, "args.txt", words))) == parse_config(OPENRLHF_OURS)

    def test_what_was_dropped_and_ignored_is_in_comments(self, tmp_path):
        lines = converted(written(tmp_path, "launch.sh", OPENRLHF_OLD)).splitlines()
        comments = [line for line in lines if line.startswith("#")]
        for begin in ("# dropped, normalize_reward: true: ", "# dropped, kl_target: 0.1: theirs is in nats",
                      "# ignored, it affects only placement and speed on a cluster:"):  # fmt: skip
            assert any(line.startswith(begin) for line in comments), begin
        assert any("zero_stage: 3" in line for line in comments if line.startswith("#   "))

    @pytest.mark.parametrize("name", LAUNCHES)
    def test_only_what_differs_from_our_defaults_is_written(self, tmp_path, name):
        text = converted(written(tmp_path, "launch.sh", LAUNCHES[name][0]))
        given, config = yaml.safe_load(text), parse_config(text)
        assert given == yaml.safe_load(dump_settings(config)) and "seed" not in text
        assert list(given) == [section for section in RunConfig.model_fields if section in given]

    def test_keys_are_told_as_the_script_spells_them(self, tmp_path):
        old, new = (converted(written(tmp_path, name, LAUNCHES[name][0])) for name in ("openrlhf_old", "openrlhf_new"))
        assert "# dropped, kl_target: 0.1: " in old and "algo.kl" not in old
        assert "# dropped, algo.kl.target: 0.1: " in new
        text = VERL.replace("$@", "reward_model.reward_manager=mine")
        assert "# dropped, reward_model.reward_manager: mine: " in converted(written(tmp_path, "launch.sh", text))

    def test_keys_of_trackers_are_written_nowhere(self, tmp_path):
        for name in ("openrlhf_old", "openrlhf_new"):
            path = written(tmp_path, name, LAUNCHES[name][0])
            assert not any("0123456789abcdef" in converted(path, to) for to in ("tether", "openrlhf", "verl"))

    def test_verl_as_yaml_with_what_hydra_fills_in(self, tmp_path):
        tree = {}
        for key, value in overrides(launches(VERL, "launch.sh")[0].words, "launch.sh").items():
            *above, last = key.split(".")
            node = tree
            for part in above:
                node = node.setdefault(part, {})
            node[last] = value
        tree["critic"]["ppo_epochs"] = "${oc.select:actor_rollout_ref.actor.ppo_epochs,1}"
        tree["trainer"]["_target_"] = "verl.Trainer"
        tree["custom_reward_function"]["reward_kwargs"] = {}
        path = written(tmp_path, "ppo.yaml", json.dumps(tree))
        assert parse_config(converted(path)) == parse_config(VERL_OURS) and "# dropped" not in converted(path)

    @pytest.mark.parametrize(
        ("manager", "prefix"),
        [
            ("reward_model.reward_manager", "+reward_model.reward_kwargs.overlong_buffer_cfg"),
            ("reward.reward_manager.name", "+reward.reward_kwargs.overlong_buffer_cfg"),
            ("reward_model.reward_manager", "reward_model.overlong_buffer"),
            ("reward_model.reward_manager", "custom_reward_function.overlong_buffer"),
        ],
    )
    def test_verls_penalty_on_long_answers(self, tmp_path, manager, prefix):
        def made(**settings):
            words = " ".join(f"{prefix}.{name}={value}" for name, value in settings.items())
            return converted(written(tmp_path, "l.sh", VERL.replace(" $@", f" {manager}=dapo {words}")))

        text = made(enable=True, len=128, penalty_factor=0.5, log=False)
        ppo = parse_config(text).ppo
        assert (ppo.overlong_buffer, ppo.overlong_penalty) == (128, 0.5)
        assert "# dropped" not in text and "reward_manager" not in text
        text = made(enable=False, len=128, penalty_factor=0.5)
        assert parse_config(text).ppo.overlong_buffer is None
        assert "# ignored, this penalty is off:\n" in text and f"{prefix.lstrip('+')}.len: 128" in text

    @pytest.mark.parametrize(
        ("more", "cap"),
        [
            ("", None),
            ("algorithm.rollout_correction.rollout_is=token", 2.0),
            ("algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=5", 5.0),
            ("algorithm.rollout_correction.rollout_is=sequence", None),
        ],
    )
    def test_verls_weights_of_tokens_that_vllm_drew(self, tmp_path, more, cap):
        made = converted(written(tmp_path, "l.sh", VERL.replace(" $@", f" {more}")))
        assert parse_config(made).importance_cap == cap
        assert ("# dropped, algorithm.rollout_correction.rollout_is: sequence" in made) is more.endswith("sequence")

    @pytest.mark.parametrize("name", ["openrlhf_old", "openrlhf_new"])
    def test_openrlhfs_engine_is_ours_where_it_shares_devices_with_training(self, tmp_path, name):
        sleeps, share = {
            "openrlhf_old": ("--vllm_enable_sleep", "--vllm_gpu_memory_utilization 0.6"),
            "openrlhf_new": ("--vllm.enable_sleep", "--vllm.gpu_memory_utilization 0.6"),
        }[name]
        more = f"{sleeps} {share} --algo.advantage.is_correction_enable"
        made = converted(written(tmp_path, "l.sh", f"{LAUNCHES[name][0].strip()} {more}\n"))
        config = parse_config(made)
        assert (config.sampling.vllm.enable_sleep_mode, config.sampling.vllm.gpu_memory_utilization) == (True, 0.6)
        assert config.importance_cap == 5
        assert "# Weights have no lower bound here; in OpenRLHF they are at least 0.5" in made
        apart = LAUNCHES[name][0].replace("--colocate_all_models", "").replace("--train.colocate_all", "")
        made = converted(written(tmp_path, "l.sh", f"{apart.strip().removesuffix(chr(92))} {more}\n"))
        vllm = parse_config(made).sampling.vllm
        assert (vllm.enable_sleep_mode, vllm.gpu_memory_utilization) == (False, 0.3)
        assert "theirs is of devices on which nothing is trained" in made

    @pytest.mark.parametrize("former", ["", "reward."])
    def test_arguments_of_verls_function_are_passed_on_but_no_keys_of_services(self, tmp_path, former):
        words = {"scale": "0.5", "mode": "strict", "names": "[a,b]", "llm.port": "80", "llm.api_key": "$SECRET"}
        section = f"+{former}custom_reward_function.reward_kwargs."
        more = " ".join(f"{section}{name}={value}" for name, value in words.items())
        made = converted(written(tmp_path, "l.sh", VERL.replace(" $@", f" {more}")))
        arguments = {"scale": 0.5, "mode": "strict", "names": ["a", "b"], "llm": {"port": 80}}
        assert yaml.safe_load(made)["rewards"][0]["arguments"] == arguments
        assert "reward_kwargs.llm.api_key: …: read it from the environment in the function" in made
        back = converted(written(tmp_path, "ours.yaml", made), "verl")
        assert "dropped, rewards" not in back
        (reward,) = parse_config(converted(written(tmp_path, "back.sh", back))).rewards
        assert reward.arguments == arguments
        other = converted(written(tmp_path, "ours.yaml", made), "openrlhf")
        assert "# dropped, rewards.0.arguments: {scale: 0.5, mode: strict," in other

    @pytest.mark.parametrize(
        ("more", "cap", "said"),
        [
            ("--enable_vllm_is_correction", 5.0, "they are at least 0.5"),
            ("--vllm_enable_is_correction --vllm_is_truncated_threshold 0 3", 3.0, ""),
            ("--enable_vllm_is_correction --vllm_is_truncated_threshold 2", 2.0, ""),
            ("--enable_vllm_is_correction --use_icepop", None, "# dropped, use_icepop: true: weights are truncated h"),
            ("--enable_vllm_is_correction --vllm_is_correction_type icepop", None,
             "# dropped, vllm_is_correction_type: icepop: weights are truncated here"),
            ("--vllm_is_truncated_threshold 1 5", None, "vllm_is_truncated_threshold: [1, 5]: there are no weights"),
        ],
    )  # fmt: skip
    def test_openrlhfs_weights_of_tokens_that_vllm_drew_in_earlier_releases(self, tmp_path, more, cap, said):
        made = converted(written(tmp_path, "l.sh", f"{OPENRLHF_OLD.strip()} {more}\n"))
        assert parse_config(made).importance_cap == cap
        assert said in made and "is_correction: true: it has" not in made

    @pytest.mark.parametrize("key", ["--async_train", "--train.async_enable", "--partial_rollout", "--vllm_is_level a"])
    def test_what_makes_openrlhfs_answers_those_of_an_earlier_policy_is_dropped(self, tmp_path, key):
        made = converted(written(tmp_path, "l.sh", f"{OPENRLHF_OLD.strip()} {key}\n"))
        assert f"# dropped, {key.removeprefix('--').split()[0]}: " in made

    def test_openrlhfs_loss_is_dropped_unless_it_is_that_of_ppo(self, tmp_path):
        dropped = "# dropped, policy_loss_type: gspo: the loss is PPO's clipped one here"
        for name, said in (("gspo", dropped), ("ppo", "")):
            made = converted(written(tmp_path, "l.sh", f"{OPENRLHF_OLD.strip()} --policy_loss_type {name}\n"))
            assert said in made and ("policy_loss_type" in made) is bool(said)

    def test_verls_keys_of_megatron(self, tmp_path):
        actor = "actor_rollout_ref.actor"
        words = f"{actor}.optim.clip_grad=0.3 actor_rollout_ref.nccl_timeout=1200 "
        words += "+actor_rollout_ref.rollout.multi_turn=False hydra.run.dir=out hydra/launcher=slurm "
        words += f"+{actor}.optim.override_optimizer_config.optimizer_cpu_offload=True"
        made = converted(written(tmp_path, "l.sh", VERL.replace(" $@", f" {words}")))
        assert parse_config(made).train.max_grad_norm == 0.3
        ignored = " ".join(line.removeprefix("#") for line in made.splitlines() if line.startswith("#   "))
        assert "# dropped" not in made and "nccl_timeout" in ignored and "optimizer_cpu_offload" in ignored

    def test_verls_keys_that_change_a_result_are_never_ignored(self, tmp_path):
        changed = {
            "actor_rollout_ref.rollout.do_sample": (True, False), "actor_rollout_ref.rollout.ignore_eos": (False, True),
            "actor_rollout_ref.rollout.repetition_penalty": (1.0, 1.2), "critic.model.lora_rank": (0, 8),
            "actor_rollout_ref.rollout.multi_turn.enable": (False, True),
            "reward.reward_kwargs.max_resp_len": (600, 500), "reward.reward_manager.name": ("naive", "mine"),
            "actor_rollout_ref.rollout.val_kwargs.n": (None, 4), "actor_rollout_ref.ref.model.path": (None, "other"),
            "actor_rollout_ref.rollout.min_p": (None, 0.1), "reward_model.max_length": (None, 512),
        }  # fmt: skip
        for column, wanted in ((0, []), (1, list(changed))):
            given = {key: values[column] for key, values in changed.items() if values[column] is not None}
            words = " ".join(f"{key}={value}" for key, value in given.items())
            lines = converted(written(tmp_path, "l.sh", VERL.replace(" $@", f" {words}"))).splitlines()
            dropped = [line.removeprefix("# dropped, ").split(": ")[0] for line in lines if line.startswith("# drop")]
            assert sorted(dropped) == sorted(wanted)
            assert not any(key in line for line in lines if line.startswith("# ignored") for key in changed)

    def test_variables_of_keys_that_change_nothing_may_be_unset(self, tmp_path):
        made = converted(written(tmp_path, "l.sh", VERL.replace("n_gpus_per_node=8", "n_gpus_per_node=$GPUS")))
        assert parse_config(made) == parse_config(VERL_OURS) and "trainer.n_gpus_per_node: $GPUS" in made

    @pytest.mark.parametrize(("stage", "text"), [("ppo", PPO), ("reward", RM), ("sft", SFT)])
    def test_llamafactorys_stages(self, tmp_path, stage, text):
        ours = written(tmp_path, "ours.yaml", converted(written(tmp_path, "their.yaml", text)))
        assert ours.read_text().startswith(f"# tether {stage} out\n")
        config = load_config(ours, (), SECTIONS[stage])
        assert config.model.lora.r == 8 and config.data.chat_template == "llama3"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("set -x\npython train.py --lr 1\n", r"TRL's PPO; got line 2 \(python train\.py\)"),
            ("A=(1\n2", "line 1: the array that begins here has no closing parenthesis"),
            (f"{TRL.strip()} --kl_coef $(cat kl)", "kl_coef: got .*; only a shell can run that command: write its"),
            ("echo\nllamafactory-cli train no.yaml", r"line 2: there is no file no\.yaml, in the current folder or"),
            ("python train.py --lr 1\n", "wanted our YAML, LLaMA-Factory's or verl's, or a script that launches"),
            ("python -m openrlhf.cli.train_ppo_ray --pretrain m\n",
             "reward_pretrain: missing, and so is remote_rm_url; wanted one of them\n"),
            ("python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m\n",
             "reward.model_name_or_path: missing, and so is reward.remote_url"),
            ("python -m openrlhf.cli.train_ppo_ray --pretrain m --agent_func_path a.py\n",
             r"of them, as an agent \(agent_func_path\) has no counterpart here: name a file with the function"),
            ("python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m\n", "data.train_files: missing"),
            ("python ppo.py --sft_model_path m --output_dir o\n", "dataset_name: missing; wanted the prompts"),
            ("python -m openrlhf.cli.train_ppo_ray 'a\n", "line 1: No closing quotation"),
            (f"{TRL.strip()} --num_mini_batches 0", "num_mini_batches: got 0; wanted a whole number above 0"),
            (f"{TRL.strip()} --stop_token stop", "stop_token: got stop; wanted eos, or no stop_token"),
            (f"{TRL.strip()} --use_peft perhaps", "use_peft: got perhaps; wanted true or false"),
            (f"{TRL.strip()} --stop_token_id 5", "stop_token_id: got 5; set sampling.stop_token to the token's text"),
            (f"{TRL.strip().replace('--total_episodes 1000000', '')} --save_steps 0.1",
             "save_steps: got 0.1; without total_episodes the number of steps in this share is unknown"),
            (f"{OPENRLHF_OLD.strip()} --lr_scheduler", "lr_scheduler: train.lr_scheduler_type: got true, want"),
            (f"{OPENRLHF_OLD.strip()} --lr_scheduler 3", "lr_scheduler: train.lr_scheduler_type: got 3, want"),
            (f"{OPENRLHF_OLD.strip()} --advantage_estimator dr_grpo",
             "advantage_estimator: got dr_grpo; wanted one of gae, reinforce, rloo, group_norm, reinforce_base"),
            (VERL.replace("adv_estimator=gae", "adv_estimator=remax"),
             "algorithm.adv_estimator: got remax; wanted one of gae, grpo, rloo, "),
            (f"{OPENRLHF_OLD.strip()} --adam_betas 0.9", "adam_betas: got 0.9; wanted two numbers"),
            (VERL.replace("adv_estimator=gae", "adv_estimator=gae actor_rollout_ref.actor.optim.betas=[a,b]"),
             r"optim.betas: got \[a, b\]; wanted two numbers"),
            (VERL.replace("critic.model.path=org/critic", "critic.model.path=${CRITIC}"),
             r"critic.model.path: got \$\{CRITIC\}; the script does not set that variable: write its value, or set it"),
            (VERL.replace("data.train_batch_size=64", "data.train_batch_size=$BATCH"), r"size: got \$BATCH; the "),
            (VERL.replace("test.parquet", "'$DIR/test.parquet'"), r"data.val_files: got .*\$DIR/test.parquet'?; the "),
            (OPENRLHF_OLD.replace("org/prompts", "$PROMPTS"), r"prompt_data: got \$PROMPTS; the script does"),
            (TRL.replace("org/tldr-rm", "${JUDGE}"), r"reward_model_path: got \$\{JUDGE\}; the script does not set"),
            (f"{VERL.strip()[:-3]} reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
             "overlong_buffer_cfg.len: missing"),
            ("python -m openrlhf.cli.train_ppo_ray x.yaml --seed 1\n", "  pretrain: missing"),
        ],
    )
    def test_mistakes(self, tmp_path, text, message):
        with pytest.raises(ConfigError, match=message):
            converted(written(tmp_path, "launch.sh", text))


    @pytest.mark.parametrize(
        "text",
        [f"{OPENRLHF_OLD.strip()} --advantage_estimator reinforce_baseline\n",
         VERL.replace("adv_estimator=gae", "adv_estimator=reinforce_plus_plus_baseline")],
    )  # fmt: skip
    def test_a_baseline_of_the_prompts_answers_has_no_critic(self, tmp_path, text):
        config = parse_config(converted(written(tmp_path, "launch.sh", text)))
        assert (config.ppo.advantage_estimator, config.ppo.whiten_advantages) == ("rloo", True)
        assert config.value_kind is None and config.sampling.num_generations == 2

    @pytest.mark.parametrize(
        "text",
        [f"{OPENRLHF_OLD.strip()} --load_checkpoint\n", f"{OPENRLHF_NEW.strip()} --ckpt.load_enable\n",
         VERL.replace(" $@", " trainer.resume_mode=auto")],
    )  # fmt: skip
    def test_a_run_that_would_go_on_where_it_can_is_able_to_start(self, tmp_path, text):
        made = converted(written(tmp_path, "launch.sh", text))
        assert parse_config(made).resume is False and "# dropped, ckpt" not in made and "resume_mode" not in made

    def test_openrlhfs_four_bits_are_those_of_the_frozen_base(self, tmp_path):
        text = f"{OPENRLHF_OLD.strip()} --load_in_4bit"
        model = parse_config(converted(written(tmp_path, "launch.sh", f"{text} --lora_rank 8\n"))).model
        assert (model.quantization, model.lora.r) == ("4bit", 8)
        made = converted(written(tmp_path, "launch.sh", f"{text}\n"))
        assert "# dropped, load_in_4bit: true: quantized weights cannot be trained themselves" in made
        assert parse_config(made).model.quantization is None

    def test_what_trl_says_of_adapters_optimizer_and_hub_is_kept(self, tmp_path):
        more = "--use_peft --lora_r 8 --lora_dropout 0.05 --load_in_4bit --adam_beta2 0.95 --push_to_hub"
        launch = written(tmp_path, "launch.sh", f"{TRL.strip()} {more} --hub_model_id a/b\n")
        config = parse_config(converted(launch))
        assert (config.model.lora.r, config.model.lora.dropout, config.model.quantization) == (8, 0.05, "4bit")
        assert (config.train.adam_beta2, config.train.push_to_hub, config.train.hub_model_id) == (0.95, True, "a/b")


    @pytest.mark.parametrize(
        ("given", "steps", "ratio"), [("0", None, 0.0), ("0.1", None, 0.1), ("3125", 3125, 0.0), ("99999", 99999, 0.0)]
    )
    def test_trls_warm_up_is_in_updates_or_a_share_of_them(self, tmp_path, given, steps, ratio):
        launch = written(tmp_path, "launch.sh", f"{TRL.strip()} --warmup_steps {given}\n")
        train = parse_config(converted(launch)).train
        assert (train.warmup_steps, train.warmup_ratio) == (steps, ratio)

    @pytest.mark.parametrize(
        ("launcher", "processes"),
        [
            ("accelerate launch --num_processes 8", 8), ("accelerate launch --num_processes=8 --machine_rank 0", 8),
            ("torchrun --nproc_per_node 4", 4), ("torchrun --nproc-per-node=4 --nnodes=2", 8),
            ("python -m torch.distributed.run --nproc_per_node 2", 2), ("python", 1),
            ("accelerate launch --config_file zero3.yaml", None), ("accelerate launch", None), ("torchrun", None),
            ("deepspeed --num_gpus 2", 2), ("deepspeed --num_gpus=2 --num_nodes=3", 6), ("deepspeed", None),
            ("CUDA_VISIBLE_DEVICES=0,2,3 deepspeed", 3), ("CUDA_VISIBLE_DEVICES=0,1 deepspeed --include host:1", None),
            ("torchrun --nproc_per_node 4 --nnodes $NODES", None), ("torchrun --nproc_per_node gpu", None),
            ("accelerate launch --config_file two.yaml", 2), ("accelerate launch --config_file two.yaml --cpu", 2),
            ("accelerate launch --config_file two.yaml --num_processes 3", 3),
            ("accelerate launch --config_file two.yaml --num_processes $COUNT", None),
            ("accelerate launch --config_file unsaid.yaml", None), ("accelerate launch --config_file two.yaml_", None),
        ],
    )  # fmt: skip
    def test_trls_batch_is_of_each_process(self, tmp_path, launcher, processes):
        written(tmp_path, "two.yaml", "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 2\n")
        written(tmp_path, "unsaid.yaml", "distributed_type: FSDP\n")
        words = TRL.strip().replace("accelerate launch --config_file deepspeed_zero3.yaml", launcher)
        text = converted(written(tmp_path, "launch.sh", f"{words} --save_steps 0.1\n"))
        train = parse_config(text).train
        assert (train.rollout_batch_size, train.micro_batch_size) == (64 * (processes or 1), 16)
        assert train.save_steps == math.ceil(0.1 * math.ceil(1000000 / 64 / (processes or 1)))
        assert ("# Their batch size is that of one process" in text) is (processes is None)
        assert "num_processes:" not in text and "nproc_per_node:" not in text
        assert ("# Started the same way" in text) is ("accelerate" in launcher or "torchrun" in launcher)

    def test_llamafactorys_batch_is_of_each_process(self, tmp_path, monkeypatch):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        for text in (PPO, SFT):
            assert "# Their batch size is that of one process" in converted(written(tmp_path, "their.yaml", text))
        monkeypatch.setenv("WORLD_SIZE", "4")
        text = converted(written(tmp_path, "their.yaml", PPO))
        assert parse_config(text).train.rollout_batch_size == 32 and "of one process" not in text

    @pytest.mark.parametrize(
        ("settings", "processes"),
        [
            ("CUDA_VISIBLE_DEVICES=0,1,2,3", 4), ("CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 NNODES=3", 6),
            ("NNODES=2 CUDA_VISIBLE_DEVICES=0,1", 4), ("CUDA_VISIBLE_DEVICES=0", 1), ("FORCE_TORCHRUN=1", None),
            ("NPROC_PER_NODE=$GPUS CUDA_VISIBLE_DEVICES=0,1", None),
        ],
    )
    def test_llamafactorys_command_starts_a_process_for_each_device(self, tmp_path, settings, processes):
        written(tmp_path, "their.yaml", PPO)
        made = converted(written(tmp_path, "launch.sh", f"{settings} llamafactory-cli train their.yaml\n"))
        assert parse_config(made).train.rollout_batch_size == 8 * (processes or 1)
        assert ("# Their batch size is that of one process" in made) is (processes in (None, 1))

    def test_trls_checkpoints_and_optimizer(self, tmp_path):
        def train(more):
            return parse_config(converted(written(tmp_path, "launch.sh", f"{TRL.strip()} {more}\n"))).train

        assert [train(more).save_steps for more in ("", "--save_steps 7", "--save_steps 0.1")] == [500, 7, 1563]
        assert train("--save_strategy no").save_steps is None
        assert train("").gradient_checkpointing and not train("--gradient_checkpointing False").gradient_checkpointing
        assert train("--optim adamw_bnb_8bit").optim == "adamw_8bit"
        made = converted(written(tmp_path, "launch.sh", f"{TRL.strip()} --optim lion_8bit --save_strategy epoch\n"))
        assert "# dropped, optim: lion_8bit: not supported here; adamw_torch_fused is used instead" in made
        assert "# dropped, save_strategy: epoch: checkpoints are saved by updates here" in made

    def test_trls_scripts_tokenize_prompts_as_plain_text(self, tmp_path):
        def made(script, more=""):
            return converted(written(tmp_path, "launch.sh", f"{TRL.strip().replace('ppo_tldr.py', script)} {more}\n"))

        for script in ("ppo.py", "ppo_tldr.py"):
            assert parse_config(made(script)).data.chat_template == "none"
        assert "all rows but the last 100, of any length" in made("ppo.py")
        assert "the last 100" not in made("ppo_tldr.py")
        assert "hold only that message" in made("ppo_tldr.py") and "hold only that" not in made("ppo.py")
        assert parse_config(made("my_own.py")).data.chat_template == "auto"
        assert "if the script does not use it, set data.chat_template: none" in made("my_own.py")
        for name, columns in (("query", {"prompt": "query"}), ("prompt", {})):
            assert parse_config(made("ppo.py", f"--dataset_text_field {name}")).data.columns == columns

    def test_trls_test_split_is_held_out_where_it_is_read(self, tmp_path):
        def config(script, more):
            text = f"{TRL.strip().replace('ppo_tldr.py', script)} {more}\n"
            return parse_config(converted(written(tmp_path, "launch.sh", text)))

        steps = "--eval_strategy steps --eval_steps 100"
        held_out = config("ppo_tldr.py", steps)
        assert (held_out.data.eval_prompts, held_out.data.eval_split) == ("org/tldr", "validation")
        assert held_out.data.subset is held_out.data.eval_subset is None
        of_one = config("ppo_tldr.py", f"{steps} --dataset_config main").data
        assert (of_one.subset, of_one.eval_subset) == ("main", "main")
        assert held_out.train.eval_steps == 100
        assert config("ppo_tldr.py", "--eval_strategy steps").train.eval_steps == 10  # their logging_steps
        assert config("ppo_tldr.py", "--eval_strategy epoch").train.eval_steps is None
        assert config("ppo_tldr.py", "").data.eval_prompts is None
        assert config("ppo.py", steps).data.eval_prompts is None  # which reads no such split

    def test_a_file_that_trls_script_is_given_is_read_and_options_take_precedence(self, tmp_path):
        program, _, arguments = TRL.strip().replace("\\\n", "").partition(" --dataset_name")
        given = options(f"--dataset_name {arguments}".split(), "TRL") | {"learning_rate": 1.0}
        written(tmp_path, "ppo.yaml", yaml.safe_dump(given))
        launch = written(tmp_path, "launch.sh", f"{program} --config ppo.yaml --learning_rate 3e-6\n")
        assert parse_config(converted(launch)) == parse_config(TRL_OURS)
        with pytest.raises(ConfigError, match=r"line 1: there is no file none\.yaml, in the current folder or beside"):
            converted(written(tmp_path, "launch.sh", f"{program} --config none.yaml\n"))

    def test_modules_that_trl_leaves_to_peft_are_those_that_peft_chooses(self, tmp_path):
        text = f"{TRL.strip()} --use_peft\n"
        assert "set model.lora.target_modules to these for the same run" in converted(
            written(tmp_path, "launch.sh", text)
        )
        for kind, chosen in (("llama", ["q_proj", "v_proj"]), ("gpt2", ["c_attn"])):
            written(tmp_path, "config.json", json.dumps({"model_type": kind}))
            launch = written(tmp_path, "launch.sh", text.replace("org/tldr-sft", str(tmp_path)))
            assert parse_config(converted(launch)).model.lora.target_modules == chosen


    def test_a_text_that_a_script_reads_into_a_variable_is_its_launch(self, tmp_path):
        arguments = OPENRLHF_OLD.partition("train_ppo_ray \\\n")[2].replace("ref_num_nodes 1", "ref_num_nodes ${ONE}")
        script = f"""set -x
            MODEL=org/sft-model; ONE=1
            read -r -d '' training_commands <<EOF
            openrlhf.cli.train_ppo \\
            {arguments}EOF
            # --flash_attn
            if [[ ${{1}} != "slurm" ]]; then
                deepspeed --num_gpus 4 --module $training_commands
            fi
            """
        script = script.replace("            ", "").replace("EOF\n#", "EOF\n#")
        made = converted(written(tmp_path, "launch.sh", script))
        assert parse_config(made) == parse_config(converted(written(tmp_path, "plain.sh", OPENRLHF_OLD)))
        assert "module" not in made and "num_gpus:" not in made and "flash_attn" not in made

    def test_conditions_that_only_a_shell_decides_are_told_with_their_line(self, tmp_path):
        text = OPENRLHF_OLD.replace("--max_epochs 1", "--max_epochs $EPOCHS")
        script = written(tmp_path, "launch.sh", f"if [ -d /data ]; then EPOCHS=2; else EPOCHS=1; fi\n{text}")
        message = r"max_epochs: got \$EPOCHS; line 1 holds a condition that only a shell knows, which decides it: write"
        with pytest.raises(ConfigError, match=message):
            converted(script)
        script = written(tmp_path, "launch.sh", f"case ${{1:-x}} in x) EPOCHS=1;; *) EPOCHS=2; esac\n{text}")
        assert parse_config(converted(script)) == parse_config(OPENRLHF_OURS)

    def test_the_round_of_a_loop_that_is_read_is_told(self, tmp_path):
        text = OPENRLHF_OLD.replace("--actor_learning_rate 5e-7", "--actor_learning_rate $RATE")
        made = converted(written(tmp_path, "launch.sh", f"for RATE in 5e-7 1e-6; do\n{text}done\n"))
        assert parse_config(made) == parse_config(OPENRLHF_OURS)
        assert "# The run is that of the first round of the loop in line 1, with RATE 5e-7.\n" in made

    def test_a_launch_that_only_an_argument_of_the_script_starts_is_read_if_there_is_no_other(self, tmp_path):
        text = f"case $1 in\n  sft) python sft.py --lr 1 ;;\n  ppo)\n{OPENRLHF_OLD} ;;\nesac\n"
        told = "# The run is in a branch that the script, as it stands, does not take (line 1).\n"
        made = converted(written(tmp_path, "launch.sh", text))
        assert parse_config(made) == parse_config(OPENRLHF_OURS) and told in made
        made = converted(written(tmp_path, "launch.sh", text + OPENRLHF_OLD.replace("5e-7", "6e-7")))
        assert parse_config(made).train.learning_rate == 6e-7 and told not in made

    def test_only_the_launch_of_ppo_counts_among_those_of_openrlhf(self, tmp_path):
        earlier = "deepspeed --module openrlhf.cli.train_rm --pretrain org/base --dataset pairs --save_path out/rm\n"
        script = written(tmp_path, "launch.sh", earlier + OPENRLHF_OLD)
        assert parse_config(converted(script)) == parse_config(converted(written(tmp_path, "one.sh", OPENRLHF_OLD)))
        with pytest.raises(ConfigError, match=r"got line 1 \(deepspeed --module openrlhf\.cli\.train_rm\)"):
            converted(written(tmp_path, "launch.sh", earlier))

    def test_a_launchers_own_options_are_not_the_runs(self, tmp_path):
        made = converted(written(tmp_path, "launch.sh", TRL))
        told = [line for line in made.splitlines() if "config_file" in line or "deepspeed_zero3" in line]
        started = "accelerate launch --config_file deepspeed_zero3.yaml -m tether ppo FILE"
        assert told == [f"# Started the same way: {started}"]

    def test_a_name_that_the_shell_makes_is_left_to_the_reader(self, tmp_path):
        for launch, key in ((OPENRLHF_OLD, "--wandb_run_name r_$(date +%d)"), (VERL, "trainer.experiment_name=`date`")):
            text = launch.strip().removesuffix("$@").replace("trainer.experiment_name=e", "trainer.default_local_dir=o")
            made = converted(written(tmp_path, "launch.sh", f"{text} {key}\n"))
            assert "run_name: r_$(date +%d): only a shell knows it" in made or (
                "trainer.experiment_name: $(date): only a shell knows it" in made
            )
            assert parse_config(made).train.run_name is None
        with pytest.raises(ConfigError, match=r"save_path: got out-\$\(date\); only a shell can run that"):
            converted(written(tmp_path, "launch.sh", OPENRLHF_OLD.replace("out/rlhf", "out-`date`")))

    def test_openrlhfs_datasets_are_joined_by_commas(self, tmp_path):
        text = OPENRLHF_OLD.replace("org/prompts", "org/prompts,more.jsonl").strip()
        data = parse_config(converted(written(tmp_path, "launch.sh", f"{text} --eval_dataset a.jsonl,b.jsonl\n"))).data
        assert (data.prompts, data.eval_prompts) == (["org/prompts", "more.jsonl"], ["a.jsonl", "b.jsonl"])

    def test_openrlhfs_former_spellings_mean_what_the_new_ones_do(self, tmp_path):
        old = "--adam_eps 1e-6 --min_lr_ratio 0.2 --loss_agg_mode seq-mean-token-mean --ckpt_path c --save_hf_ckpt "
        old += "--ref_pretrain org/sft-model --wandb_project p --enforce_eager --overlap_comm --max_new_tokens 77"
        text = OPENRLHF_OLD.replace("--generate_max_len 300 ", "").strip()
        made = converted(written(tmp_path, "launch.sh", f"{text} {old}\n"))
        config = parse_config(made)
        assert (config.train.adam_epsilon, config.train.lr_scheduler_kwargs) == (1e-6, {"min_lr_rate": 0.2})
        assert (config.ppo.loss_reduction, config.sampling.response_length) == ("sequence_mean", 77)
        lost = [line.split(":")[0] for line in made.splitlines() if line.startswith("# dropped")]
        assert lost == ["# dropped, kl_target", "# dropped, normalize_reward"]
        other = converted(written(tmp_path, "launch.sh", f"{text} {old.replace('org/sft-model', 'org/other')}\n"))
        assert "ref_pretrain: org/other: the reference is the policy that the run starts from" in other

    def test_openrlhfs_bounds_of_the_score(self, tmp_path):
        def made(bounds, rewards="org/reward-a"):
            text = OPENRLHF_OLD.replace("org/reward-a", rewards).strip()
            return converted(written(tmp_path, "launch.sh", f"{text} --reward_clip_range {bounds}\n"))

        config = parse_config(made("-5 5"))
        assert (config.ppo.reward_clip, config.rewards[0].clip) == (5, None)
        config = parse_config(made("0 8"))
        assert (config.ppo.reward_clip, config.rewards[0].clip) == (None, [0, 8])
        assert "# dropped, reward_clip_range: [0, 8]: of several rewards each has bounds" in made("0 8", "org/a,org/b")

    @pytest.mark.parametrize(
        "key", ["actor_rollout_ref.model.use_rmpad=True", "critic.model.fsdp_config.grad_offload=False",
                "actor_rollout_ref.actor.ppo_micro_batch_size=32"],
    )  # fmt: skip
    def test_a_launch_with_keys_of_former_verl_has_its_defaults(self, tmp_path, key):
        text = VERL.replace("algorithm.use_kl_in_reward=True ", "").replace(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", f"trainer.nnodes=2 {key}"
        )
        made = converted(written(tmp_path, "launch.sh", text))
        ppo = parse_config(made).ppo
        assert (ppo.kl_coef, ppo.entropy_coef, ppo.dual_clip) == (0.01, 0.001, None)
        assert f"# The defaults are those of verl before 0.3, which had the key {key.partition('=')[0]}: " in made
        if "micro" in key:
            assert parse_config(made).train.micro_batch_size == 2
            with pytest.raises(ConfigError, match=r"trainer.nnodes: got \$NODES; the script does not set that"):
                converted(written(tmp_path, "launch.sh", text.replace("nnodes=2", "nnodes=$NODES")))
        off = parse_config(converted(written(tmp_path, "launch.sh", f"{text.strip()[:-3]} {KL_LOSS}"))).ppo
        assert (off.kl_in, off.kl_coef) == ("loss", 0.2)

    def test_a_coefficient_that_is_not_used_is_told(self, tmp_path):
        made = converted(written(tmp_path, "launch.sh", VERL.replace("algorithm.use_kl_in_reward=True ", "")))
        assert parse_config(made).ppo.kl_coef == 0
        assert "# The KL is off, as by default in verl. Before verl 0.3 it was in the reward: ppo.kl_coef: 0.01" in made

    def test_verls_folder_has_no_name_that_only_the_shell_knows(self, tmp_path):
        made = converted(written(tmp_path, "launch.sh", VERL.replace("experiment_name=e", "experiment_name=$(date)")))
        assert parse_config(made).output_dir == Path("checkpoints/p")

    @pytest.mark.parametrize("program", ["srun --overlap python -m openrlhf.cli.train_ppo_ray", "python ./verl/run.py"])
    def test_a_program_is_verls_by_its_module_or_its_keys(self, tmp_path, program):
        earlier = "mkdir -p runs/verl_1\ncp $0 runs/verl_1\n"
        script = OPENRLHF_OLD.replace("python3 -m openrlhf.cli.train_ppo_ray", program)
        made = converted(written(tmp_path, "launch.sh", earlier + script))
        assert parse_config(made) == parse_config(OPENRLHF_OURS)

    def test_verls_warm_up_in_updates_and_its_cosine_with_a_floor(self, tmp_path):
        def train(more):
            return parse_config(converted(written(tmp_path, "launch.sh", VERL.replace(" $@", more)))).train

        optim = " actor_rollout_ref.actor.optim."
        given = train(f"{optim}lr_warmup_steps=10{optim}lr_warmup_steps_ratio=0.5")
        assert (given.warmup_steps, given.warmup_ratio) == (10, 0)
        given = train(f"{optim}lr_warmup_steps=-1{optim}lr_warmup_steps_ratio=0.5")
        assert (given.warmup_steps, given.warmup_ratio) == (None, 0.5)
        given = train(f"{optim}warmup_style=cosine{optim}min_lr_ratio=0.1")
        assert (given.lr_scheduler_type, given.lr_scheduler_kwargs) == ("cosine_with_min_lr", {"min_lr_rate": 0.1})
        assert train(f"{optim}warmup_style=cosine{optim}min_lr_ratio=0.0").lr_scheduler_type == "cosine"

    @pytest.mark.parametrize("name", ["--config-name=mine", "--config mine", "--config-path . --config-name 'mine'"])
    def test_a_configuration_file_that_verl_is_given_is_named(self, tmp_path, name):
        made = converted(written(tmp_path, "launch.sh", VERL.replace("main_ppo", f"main_ppo {name}")))
        assert "# The values in the file mine are not read, only those that the script gives" in made
        usual = VERL.replace("main_ppo", "main_ppo --config-name='ppo_trainer.yaml'")
        assert "are not read" not in converted(written(tmp_path, "launch.sh", usual))

    @pytest.mark.parametrize("form", ["array", "variables", "words", "module"])
    def test_scripts_are_read_as_a_shell_reads_them(self, tmp_path, form):
        program, *rest = TRL.strip().replace("\\\n", "").partition(" --dataset_name")
        arguments = "--dataset_name" + rest[1]
        script = {
            "array": f"""#!/bin/bash
                set -euo pipefail
                ARGS=(
                    {arguments.replace("--learning_rate 3e-6", "")}  # those of the paper
                )
                ARGS+=( --learning_rate "3e-6" )
                CUDA_VISIBLE_DEVICES=0,1 WANDB_MODE=offline {program} "${{ARGS[@]}}" "$@" 2>&1 | tee logs/train.log
            """,
            "variables": f"""
                export LAUNCH="{program}" RATE=$((1+2))e-6
                ARGS='{arguments}'
                mkdir -p logs && cd "$HOME"; nohup $LAUNCH $ARGS > logs/$(date +%F).log 2>&1 &
            """,
            "words": f"if true; then {program} \\\n # --kl_coef 9 \\\n {arguments} >>log; fi",
            "module": f"python -m torch.distributed.run examples/scripts/ppo/ppo_tldr.py {arguments}|tee log",
        }[form]
        assert parse_config(converted(written(tmp_path, "launch.sh", script))) == parse_config(TRL_OURS)

    @pytest.mark.parametrize(
        ("script", "words"),
        [
            ('M=${1:-"org/a b"}\npython t.py --m "$M"', ["--m", "org/a b"]),  # the quotes are not part of the name
            ('python t.py --m ${1:-"org/a b"} --n', ["--m", "org/a b", "--n"]),
            ('D="${OUT:-"$HOME/a"}"\npython t.py --d $D', ["--d", f"{Path.home()}/a"]),
            ("M=\npython t.py --m ${M:-${N:-c}}", ["--m", "c"]),
            ('python t.py --d "$(cat "a b" | head -1)/c"', ["--d", '$(cat "a b" | head -1)/c']),
            ('MORE=()\npython t.py --a 1 "${MORE[@]}"', ["--a", "1"]),
            ('MORE=()\nif true; then\n MORE+=(--b 2)\nfi\npython t.py --a 1 "${MORE[@]}"', ["--a", "1", "--b", "2"]),
            ("python t.py --a 1 \\", ["--a", "1"]),
            ("A=1\npython t.py --a $A --b '$A'", ["--a", "1", "--b", "$A"]),
            ("(cd a && python t.py --a 1)", ["--a", "1"]),
            ("python t.py --a 1 > >(tee log) 2>&1", ["--a", "1"]),
            ("cat > a.txt <<EOF\nit's python u.py --b 2\nEOF\npython t.py --a 1", ["--a", "1"]),
            ("cat <<-'A' <<B > a.txt\n--b 2\n\tA\n--c 3\nB\npython t.py --a 1", ["--a", "1"]),
            ("(( n = 1 << k ))\npython t.py --a 1", ["--a", "1"]),
            ("read -r -d '' A <<EOF\n--a $B \\\n  it's\n\nEOF\npython t.py $A", ["--a", "$B", "it's"]),
            ("B=2\nread -d '' A <<EOF\n--a ${B}\nEOF\nread -d '' C <<'EOF'\n--c $B\nEOF\npython t.py $A $C",
             ["--a", "2", "--c", "$B"]),
            ("N=$((1024 * 2))\npython t.py --a $((N / (3 + 1) - 1))k --b \"$(( N%5 ))\"", ["--a", "511k", "--b", "3"]),
            ("python t.py --a $((M * 2)) --b $((1.5 * 2))", ["--a", "$((M * 2))", "--b", "$((1.5 * 2))"]),
            ("A=1\npython t.py --a ${A:+2} ${B:+--b} ${B+--c $B} --d ${A:?} ${C:=3} ${F-4}",
             ["--a", "2", "--d", "1", "3", "4"]),
            ("M=a/b.c.d\npython t.py --a ${M##*/} ${M#*/}_${M%.*} ${M%%.*} ${M%x} ${M^^} ${N##*/}",
             ["--a", "b.c.d", "b.c.d_a/b.c", "a/b", "a/b.c.d", "A/B.C.D", "${N##*/}"]),
            (': "${R:=2}" ${S=a}\n: ${R:=3}\npython t.py --a $R --b $S', ["--a", "2", "--b", "a"]),
            ("E=\npython t.py --a ${E-4} --b ${E:-5} ${E:+--c} ${E+--d}", ["--a", "--b", "5", "--d"]),
            ("D=`date +%F`\npython t.py --a $D --b \"x-`date`\"", ["--a", "$(date +%F)", "--b", "x-$(date)"]),
            ("python t.py --a $'User: {}\\nBot: ' --b $'it\\'s'", ["--a", "User: {}\nBot: ", "--b", "it's"]),
            ('D="$(dirname "$0")"\npython t.py --a $D/a --b $(dirname ${BASH_SOURCE[0]})',
             ["--a", "sub/a", "--b", "sub"]),
            ('D="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"\npython t.py --a $D/a --b `pwd` --c "$PWD"',
             ["--a", f"{Path.cwd()}/a", "--b", str(Path.cwd()), "--c", str(Path.cwd())]),
            ('M=org/Model\npython t.py --a $(basename $M) --b "$(basename "${M,,}")_x" --c $(basename a.py .py)',
             ["--a", "Model", "--b", "model_x", "--c", "a"]),
            ('python t.py --a $(realpath ..) --b $(realpath "$B") --c $(ls | head)',
             ["--a", str(Path.cwd().parent), "--b", '$(realpath "$B")', "--c", "$(ls | head)"]),
            ("cd /x\npython t.py --a $PWD --b $(pwd)", ["--a", "$PWD", "--b", "$(pwd)"]),
            ('O=out\nnohup srun bash -c "set -x; \\\nA=1 python t.py --a $O --b \\"[\'x\']\\" \\\n --c 2" &> log &',
             ["--a", "out", "--b", "['x']", "--c", "2"]),
            ("O=out\nbash -lc 'python t.py --a $O'", ["--a", "out"]),
            ('C="python t.py --a 1"\neval "$C --b 2"', ["--a", "1", "--b", "2"]),
            ("torchrun --nproc_per_node 2 -m a.b --a 1", ["--a", "1"]),
            ("python -m torch.distributed.run --nproc_per_node 2 t.py --a u.py", ["--a", "u.py"]),
            ("--a u.py --b 1", ["--a", "u.py", "--b", "1"]),
            ("bash -c \"it's\"\npython t.py --a 1", ["--a", "1"]),
        ],
    )
    def test_words_are_those_that_a_shell_passes_on(self, script, words):
        assert [list(each.words) for each in launches(script, "sub/launch.sh") if each.words] == [words]

    @pytest.mark.parametrize("form", ["options", "file", "deepspeed", "old", "module", "elsewhere", "bare", "launcher"])
    def test_llamafactorys_launches(self, tmp_path, form):
        given = yaml.safe_load(PPO)
        file = written(tmp_path, "their.yaml", PPO.replace("per_device_train_batch_size: 1", ""))
        options = " ".join(f"--{key} {str(value)!r}" for key, value in given.items())
        script = {
            "options": f"FORCE_TORCHRUN=1 llamafactory-cli train \\\n{options} 2>&1 | tee log",
            "file": f"llamafactory-cli train {file.name} per_device_train_batch_size=1 > log",
            "deepspeed": f"deepspeed --num_gpus 2 --master_port=9901 src/train.py {options}",
            "old": f"CUDA_VISIBLE_DEVICES=0 python src/train_bash.py {options}",
            "module": f"python -m llamafactory.cli train {file.name} per_device_train_batch_size=1",
            "elsewhere": f"python ../LLaMA-Factory/src/train.py {file.name} per_device_train_batch_size=1",
            "bare": f"python train.py {options}",
            "launcher": f"python -m llamafactory.launcher {file.name} per_device_train_batch_size=1",
        }[form]
        made = converted(written(tmp_path, "launch.sh", script))
        wanted = parse_config(converted(written(tmp_path, "same.yaml", PPO)))
        if form == "deepspeed":
            size = 2 * wanted.train.rollout_batch_size
            wanted = wanted.model_copy(update={"train": wanted.train.model_copy(update={"rollout_batch_size": size})})
        assert parse_config(made) == wanted
        assert ("# Their batch size is that of one process" in made) is (form != "deepspeed")

    def test_a_file_that_the_script_writes_itself_is_read(self, tmp_path):
        text = PPO.replace("output_dir: saves/", "output_dir: ${OUT}/")
        script = f"OUT=saves\ncat > conf/ppo.yaml <<EOF\n{text}EOF\nllamafactory-cli train conf/ppo.yaml\n"
        made = converted(written(tmp_path, "launch.sh", script))
        assert parse_config(made) == parse_config(converted(written(tmp_path, "same.yaml", PPO)))
        script = script.replace("cat > conf/ppo.yaml <<EOF", "cat <<'EOF' >conf/ppo.yaml")
        with pytest.raises(ConfigError, match=r"output_dir: got \$\{OUT\}/.*; the script does not set that variable"):
            converted(written(tmp_path, "l.sh", script))
        settings = "tee acc.yaml <<< no\ncat <<E >acc.yaml\nnum_processes: 3\nE\n"
        launch = TRL.replace("deepspeed_zero3.yaml", "acc.yaml")
        assert parse_config(converted(written(tmp_path, "t.sh", settings + launch))).train.rollout_batch_size == 192

    def test_what_would_be_sharded_on_several_devices_is_said(self, tmp_path):
        made = converted(written(tmp_path, "their.yaml", f"{SFT}deepspeed: ds_z3.json\n"))
        assert "there is nothing to shard; on several the launcher sets it: accelerate launch --use_deepspeed " in made
        assert "--deepspeed_config_file ds_z3.json --num_processes N -m tether sft" in made

    def test_what_the_launcher_shards_is_said_and_a_name_of_the_shell_dropped(self, tmp_path):
        options = " ".join(f"--{key} {str(value)!r}" for key, value in yaml.safe_load(RM).items())
        words = f"torchrun --nproc_per_node 2 src/train.py {options} --deepspeed ds.json --run_name r-$(date)"
        made = converted(written(tmp_path, "launch.sh", words))
        assert "--deepspeed_config_file ds.json --num_processes 2 -m tether reward" in made
        assert "# dropped, run_name: r-$(date): only a shell knows it" in made

    def test_a_launch_of_another_stage_is_for_its_command(self, tmp_path):
        options = " ".join(f"--{key} {str(value)!r}" for key, value in yaml.safe_load(SFT).items())
        made = converted(written(tmp_path, "launch.sh", f"llamafactory-cli train {options}"))
        assert made.startswith("# tether sft ")


@pytest.mark.parametrize("value", ["False", "-1", "0"])
def test_verl_turns_evaluations_and_checkpoints_off_by_false_or_a_number(tmp_path, value):
    launch = VERL.replace("save_freq=20", f"save_freq={value}").replace("test_freq=10", f"test_freq={value}")
    train = parse_config(converted(written(tmp_path, "launch.sh", launch))).train
    assert (train.eval_steps, train.save_steps) == (None, None)


class TestOfTrl:
    def test_what_a_launch_leaves_out_is_trls_default(self, tmp_path):
        made = converted(written(tmp_path, "launch.sh", "python ppo.py --dataset_name org/d --total_episodes 10000"))
        config = parse_config(made)
        assert config.model.path == config.rewards[0].path == "EleutherAI/pythia-160m"
        assert config.output_dir.name == "trainer_output" and "Started" not in made

    @pytest.mark.parametrize(
        "launcher",
        ["accelerate launch --config_file a/zero3.yaml --num_processes 4", "torchrun --nproc_per_node 4", "torchrun"],
    )
    @pytest.mark.parametrize("script", ["examples/scripts/ppo/ppo.py", "-m trl.scripts.ppo"])
    def test_it_is_said_how_the_launcher_starts_ours(self, tmp_path, launcher, script):
        words = f"CUDA_VISIBLE_DEVICES=0,1 {launcher} {script} --dataset_name org/d --sft_model_path m"
        made = converted(written(tmp_path, "launch.sh", words))
        assert f"# Started the same way: {launcher} -m tether ppo FILE" in made.splitlines()


class TestFromOurs:
    @pytest.mark.parametrize("to", ["openrlhf", "verl"])
    def test_there_and_back(self, tmp_path, to):
        start = parse_config(OURS)
        script = converted(written(tmp_path, "ours.yaml", OURS), to)
        back = parse_config(converted(written(tmp_path, "launch.sh", script)))
        for section in RunConfig.model_fields:
            before, after = (config.model_dump()[section] for config in (start, back))
            for key in LOST.get(to, {}).get(section, ()):
                before.pop(key), after.pop(key)
            assert after == before, section

    @pytest.mark.parametrize("to", ["openrlhf", "verl"])
    @pytest.mark.parametrize("critic", ["", "rloo"])
    def test_what_only_an_unusual_value_or_name_says_comes_back(self, tmp_path, to, critic):
        ours = "\n".join(line for line in OURS.splitlines() if not critic or not line.startswith("value:"))
        for there, here in {"dual_clip: 4, ": "", "gamma: 0.99,": "",
                            "cliprange_value: 0.4, ": "" if critic else "cliprange_value: 0.4, ",
                            "lam: 0.9, ": "advantage_estimator: rloo, whiten_advantages: true, " if critic else "",
                            "bf16: true": "fp16: true"}.items():  # fmt: skip
            ours = ours.replace(there, here)
        script = converted(written(tmp_path, "ours.yaml", ours), to)
        back = parse_config(converted(written(tmp_path, "launch.sh", script)))
        start = parse_config(ours)
        assert (back.ppo, back.train.fp16, back.train.bf16) == (start.ppo, True, None)
        assert "dropped, ppo." not in script and "dropped, train.adam_epsilon" not in script

    @pytest.mark.parametrize(
        ("words", "reward"),
        [
            ("--remote_rm_url judge.py --label_key gold",
             {"type": "function", "path": "judge.py", "name": "reward_func", "label": "gold"}),
            ("--remote_rm_url judge.py", {"type": "function", "path": "judge.py", "name": "reward_func"}),
            ("--remote_rm_url http://a/b --label_key gold",
             {"type": "http", "url": "http://a/b", "protocol": "openrlhf", "columns": ["gold"]}),
            ("--remote_rm_url http://a/b", {"type": "http", "url": "http://a/b", "protocol": "openrlhf"}),
        ],
    )
    def test_openrlhfs_rewards_are_called_as_they_are(self, tmp_path, words, reward):
        launch = OPENRLHF_OLD.replace("--reward_pretrain org/reward-a", words)
        made = converted(written(tmp_path, "launch.sh", launch))
        assert yaml.safe_load(made)["rewards"] == [reward]
        assert "label_key" not in made and "must" not in made
        script = converted(written(tmp_path, "ours.yaml", made), "openrlhf")
        assert "dropped, rewards" not in script
        assert yaml.safe_load(converted(written(tmp_path, "back.sh", script)))["rewards"] == [reward]

    def test_openrlhfs_template_of_prompts_is_a_file_here(self, tmp_path):
        made = converted(written(tmp_path, "launch.sh", OPENRLHF_OLD.strip() + " --input_template 'Q: {} A:'"))
        assert "# dropped, input_template: Q: {} A:: name a Jinja file with the same text in data.chat_t" in made

    def test_what_they_cannot_say_is_named(self, tmp_path):
        text = OURS.replace("kl_coef: 0.03,", "kl_coef: 0.03, kl_target: 6, score_norm: frozen,").replace(
            "path: org/judge}", "path: org/judge, weight: 2, max_length: 99}"
        )
        text = text.replace("temperature: 0.9,", 'temperature: 0.9, stop_strings: ["\\nHuman:", "###"],')
        for to in ("openrlhf", "verl"):
            script = converted(written(tmp_path, "ours.yaml", text), to)
            for line in ("# dropped, ppo.kl_target: 6", "# dropped, ppo.score_norm: frozen",
                         "# dropped, sampling.stop_strings: ['\\nHuman:', ###]",
                         "# dropped, rewards.0.weight: 2", "# dropped, rewards.0.max_length: 99"):  # fmt: skip
                assert line in script.splitlines(), (to, line)
            assert "ppo.gamma" not in script

    def test_every_word_survives_the_shell(self, tmp_path):
        script = converted(written(tmp_path, "ours.yaml", OURS), "openrlhf")
        (launch,) = launches(script, "x")
        assert launch.program.endswith("-m openrlhf.cli.train_ppo_ray")
        given = options(launch.words, "x")
        assert given["data.prompt_dataset"] == "odd name's.parquet"
        assert given["ds.lora.target_modules"] == ["q_proj", "v_proj"]
        assert given["actor.eps_clip_low_high"] == [0.1, 0.3]

    def test_llamafactory_to_a_cluster(self, tmp_path):
        script = converted(written(tmp_path, "their.yaml", PPO), "verl")
        assert "actor_rollout_ref.model.lora_rank=8" in script and "# Their critic is a model of its own" in script

    def test_stages_before_ppo_have_no_launch(self, tmp_path):
        with pytest.raises(ConfigError, match="verl has no launch for sft"):
            converted(written(tmp_path, "their.yaml", SFT), "verl")

    def test_ours_to_ours_is_no_conversion(self, tmp_path):
        with pytest.raises(ConfigError, match="is already Tether's"):
            converted(written(tmp_path, "ours.yaml", OURS))


class TestCommand:
    @pytest.fixture(autouse=True)
    def leave_the_process_as_it_was(self, monkeypatch):
        monkeypatch.setattr("tether.cli.main.quieten", lambda *, debug: None)

    def test_writes_the_file_and_shows_what_became_of_what(self, tmp_path, capsys):
        path, out = written(tmp_path, "launch.sh", VERL), tmp_path / "ours.yaml"
        assert main(["convert", str(path), "--to", "tether", "-o", str(out)]) == 0
        assert load_config(out) == parse_config(VERL_OURS)
        shown = capsys.readouterr().out
        assert "algorithm.lam (default)" in shown and str(out) in shown

    @pytest.mark.parametrize("command", ["ppo", "sft", "plan"])
    def test_a_script_is_no_configuration(self, tmp_path, capsys, command):
        path = written(tmp_path, "launch.sh", TRL)
        assert main([command, str(path)]) == 2
        assert f"is a script, wanted a YAML file: `tether convert {path} --to tether" in capsys.readouterr().err

    def test_scripts_can_be_run(self, tmp_path):
        out = tmp_path / "run.sh"
        assert main(["convert", str(written(tmp_path, "ours.yaml", OURS)), "--to", "openrlhf", "-o", str(out)]) == 0
        assert out.stat().st_mode & 0o100 and out.read_text().startswith("#!/bin/sh\n")

    def test_writes_over_nothing(self, tmp_path, capsys):
        out = written(tmp_path, "there.yaml", "mine")
        nowhere = str(tmp_path / "none" / "new.yaml")
        assert main(["convert", str(written(tmp_path, "l.sh", VERL)), "--to", "tether", "-o", nowhere]) == 2
        assert "new.yaml cannot be written: No such file or directory" in capsys.readouterr().err.splitlines()[-1]
        assert main(["convert", str(written(tmp_path, "l.sh", VERL)), "--to", "tether", "-o", str(out)]) == 2
        assert "there.yaml exists" in capsys.readouterr().err and Path(out).read_text() == "mine"


def test_what_the_launch_chooses_and_we_have_not_is_named(tmp_path):
    text = VERL.replace("kl_ctrl.kl_coef=0.01", "kl_ctrl.kl_coef=0.01 algorithm.kl_penalty=full")
    made = converted(written(tmp_path, "l.sh", text))
    assert "# dropped, algorithm.kl_penalty: full: not supported here; k1 is used instead" in made
    text = text.replace("data.val_files=test.parquet", "data.val_files=$HOME/test.parquet")
    made = parse_config(converted(written(tmp_path, "l.sh", text)))
    assert made.data.eval_prompts == str(Path.home() / "test.parquet")
