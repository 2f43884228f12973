"""The phases of PPO driven by hand, where a loop of TRL ≤ 0.11 had ``generate`` and ``step``; see docs/from_trl.md.

    python examples/phases_by_hand.py run.yaml
"""

import sys

from tether import RewardOutput, load_config, open_trainer
from tether.metrics.reduce import Metrics
from tether.models.saving import save_policy
from tether.train.costs import timed
from tether.train.rollout import Answers
from tether.types import Completion, Prompt


def scores_of(queries, responses):
    """The loop's own judge, in place of the reward sources of the file: 1 for an answer of at least four words."""
    return [float(len(response.split()) >= 4) for response in responses]


def answers_of(queries, responses, tokenizer):
    """Answers from elsewhere as ``PPOTrainer.rollout`` gives them; one for each row of the rollout batch.

    The policy that is trained must have written them: the ratio starts from its own log-probabilities.

    Args:
        queries, responses: token ids without padding, the end token included.
    """
    texts = [tokenizer.decode(ids) for ids in queries]
    ends = ["stop" if ids[-1] == tokenizer.eos_token_id else "length" for ids in responses]
    return Answers(
        prompts=[Prompt(i, text, text, tuple(queries[i])) for i, text in enumerate(texts)],
        completions=[Completion(list(ids), end) for ids, end in zip(responses, ends, strict=True)],
        texts=[tokenizer.decode(ids, skip_special_tokens=True) for ids in responses],
    )


def one_update(trainer):
    """Rollout, scores, experience and update; returns the metrics."""
    metrics = Metrics()
    with timed(metrics, "step", trainer.dist.device):
        answers = trainer.rollout(metrics)  # or answers_of(queries, responses, tokenizer)
        scores = scores_of([prompt.text for prompt in answers.prompts], answers.texts)
        judged, moments = trainer.score(answers, metrics, RewardOutput(scores))
        experience = trainer.experience(answers, judged, metrics)
        optimizers = trainer.update(experience, answers, metrics)
        trainer.parts.generator.sync_weights(trainer.roles.policy)
    values = trainer.finish(metrics, moments, optimizers)
    trainer.record(values)
    return values


def main(path):
    """Trains as the file says, with the judge above."""
    with open_trainer(load_config(path)) as trainer:
        while trainer.state.step < trainer.num_updates:
            values = one_update(trainer)
            print(f"update {trainer.state.step}: score {values['objective/scores']:.3f}")
        save_policy(trainer.roles, trainer.parts.tokenizer, trainer.config.output_dir)


if __name__ == "__main__":
    main(sys.argv[1])
