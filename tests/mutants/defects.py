"""Defects that an implementation of PPO for language models really gets: one-line edits, with tests that should notice.

No edit makes the source fail by itself, and hardly one changes a shape: these are faults that train on and say nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tether"
HOLES = "tests/mutants/test_holes.py"
BOOKKEEPING = "tests/train/test_bookkeeping.py"
BITWISE = "tests/models/test_roles_bitwise.py::test_old_new_and_reference_are_bitwise_equal_at_the_start"


@dataclass(frozen=True)
class Defect:
    """One edit that makes the source wrong."""

    name: str
    """The defect in words."""
    file: str
    """Where it is, from ``src/tether``."""
    old: str
    """Text that occurs once in the file."""
    new: str
    """What stands there instead."""
    tests: tuple[str, ...]
    """Paths or node ids of tests of which one should fail, the cheapest first."""

    def planted(self, source: str) -> str:
        """The file's text with the defect in it."""
        assert source.count(self.old) == 1, f"{self.file}: {self.name}: {source.count(self.old)} places, wanted 1"
        return source.replace(self.old, self.new)


def in_file(file: str, *edits: tuple[str, str, str], tests: tuple[str, ...]) -> tuple[Defect, ...]:
    """Defects of one file that the same tests should notice, each given as (name, old, new)."""
    return tuple(Defect(name, file, old, new, tests) for name, old, new in edits)


def whole_step(*cases: str) -> tuple[str, ...]:
    """Tests that hold an update of the trainer against one that is written a second time."""
    test = "tests/train/test_whole_step.py::test_parameters_equal_updates_written_a_second_time"
    return tuple(f"{test}[{case}]" for case in cases)


def logged(*cases: str) -> tuple[str, ...]:
    """Tests that hold what an update and an evaluation log against the same worked out by hand."""
    test = "tests/train/test_metrics.py::test_logged_numbers_are_those_worked_out_by_hand"
    return tuple(f"{test}[{case}]" for case in cases)


ADVANTAGES = in_file(
    "algo/advantages.py",
    (
        "the score lies one token before the last",
        "== mask.sum(dim=1, keepdim=True))",
        "== mask.sum(dim=1, keepdim=True) - 1)",
    ),
    (
        "the score lies on the first token",
        "mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True)",
        "mask.cumsum(dim=1) == 1",
    ),
    ("the score lies in the padding too", "mask & (mask.cumsum", "(mask.cumsum"),
    ("the KL is rewarded", "-kl_coef * wide(kl)", "kl_coef * wide(kl)"),
    (
        "the KL of an answer is a mean over its tokens",
        "-kl_coef * wide(kl)",
        "-kl_coef * wide(kl) / mask.sum(dim=1, keepdim=True)",
    ),
    ("the KL of the last token is lost", "rewards + scores.unsqueeze(1)", "scores.unsqueeze(1)"),
    ("scores of tokens are paid twice", "scores - early.sum(dim=1)", "scores"),
    ("the last token's own score counts", "mask & ~is_last", "mask"),
    ("token rewards in half precision", "wide(kl)", "kl"),
    ("γ is missing in the TD error", "gamma * next_values", "next_values"),
    ("λ discounts the next value instead of γ", "gamma * next_values", "lam * next_values"),
    ("λ is missing in the sum of TD errors", "decay * columns[t + 1]", "gamma * columns[t + 1]"),
    ("γ is missing in the sum of TD errors", "decay * columns[t + 1]", "lam * columns[t + 1]"),
    ("the TD error lacks the value of its own state", "gamma * next_values - values", "gamma * next_values"),
    ("the last token bootstraps from the first", "torch.zeros_like(values[:, :1])], dim", "values[:, :1]], dim"),
    (
        "the last token of a full row bootstraps from itself",
        "torch.zeros_like(values[:, :1])], dim",
        "values[:, -1:]], dim",
    ),
    ("advantages bootstrap from the padding", "torch.where(mask, wide(x), 0.0) for x", "wide(x) for x"),
    ("GAE runs forward in time", "in reversed(range(len(columns) - 1))", "in range(len(columns) - 1)"),
    ("returns lack the values", "advantages, advantages + values", "advantages, advantages"),
    ("the length-adaptive λ is not clamped", ".clamp(min=0.0)", ""),
    ("the length-adaptive λ lacks α", "(alpha * lengths)", "lengths"),
    (
        "RLOO's baseline holds the answer itself",
        "gaps.sum(dim=2) / (num_generations - 1)",
        "gaps.sum(dim=2) / num_generations",
    ),
    (
        "the rows of a prompt are taken for interleaved",
        "dim=1).reshape(-1, num_generations)",
        "dim=1).reshape(num_generations, -1).T",
    ),
    (
        "group advantages have the wrong sign",
        "returns.unsqueeze(2) - returns.unsqueeze(1)",
        "returns.unsqueeze(1) - returns.unsqueeze(2)",
    ),
    ("the return of an answer counts padding", "masked_sum(wide(rewards), mask, dim=1)", "wide(rewards).sum(dim=1)"),
    ("GRPO divides by the variance", "/ (num_generations - 1)).sqrt()", "/ (num_generations - 1))"),
    ("GRPO's standard deviation is biased", "keepdim=True) / (num_generations - 1)", "keepdim=True) / num_generations"),
    ("GRPO's ε is missing", "(std + GROUP_EPSILON)", "std"),
    (
        "GRPO's penalty keeps its mean",
        "_return_gaps(penalties, mask, num_generations).sum(dim=2) / num_generations",
        "masked_sum(wide(penalties), mask, dim=1).reshape(-1, num_generations)",
    ),
    (
        "GRPO: one equal pair is a group of equal scores",
        "(groups == groups[:, :1]).all(",
        "(groups[:, 1:] == groups[:, :1]).any(",
    ),
    ("the return to go is cut short by λ", "gamma=gamma, lam=1.0", "gamma=gamma, lam=0.95"),
    ("returns are one-step targets", "advantages, advantages + values", "advantages, rewards + gamma * next_values"),
    tests=("tests/algo/test_advantages.py", "tests/algo/test_critic_free.py", "tests/algo/test_padding.py"),
)

KL = in_file(
    "algo/kl.py",
    ("k1 is the KL's negative", "return -log_ratio", "return log_ratio"),
    ("k1 is the size of the log-ratio", "return -log_ratio", "return log_ratio.abs()"),
    ("k2 lacks its half", "log_ratio.square() / 2", "log_ratio.square()"),
    (
        "k3 estimates the KL the other way round",
        "torch.expm1(log_ratio) - log_ratio",
        "torch.expm1(-log_ratio) + log_ratio",
    ),
    ("k3 of a small step loses its digits", "torch.expm1(log_ratio)", "(log_ratio.exp() - 1)"),
    (
        "the log-ratio is taken in half precision",
        "wide(ref_logprobs) - wide(logprobs)",
        "wide(ref_logprobs - logprobs)",
    ),
    (
        "no gradient flows through the ratio of the KL in the loss",
        '(rho.detach() if estimator == "k2" else rho)',
        "rho.detach()",
    ),
    ("a gradient flows through the ratio of k2 in the loss", '(rho.detach() if estimator == "k2" else rho)', "rho"),
    (
        "the ratio of the KL in the loss is upside down",
        "rho = ratio(new_logprobs, logprobs)",
        "rho = ratio(logprobs, new_logprobs)",
    ),
    (
        "the drift within an update is that from new to old",
        'kl_estimate(logprobs, new_logprobs, "k3")',
        'kl_estimate(new_logprobs, logprobs, "k3")',
    ),
    (
        "the controller lowers the coefficient of a policy that strayed",
        "max(sequence_kl / target - 1, -MAX_ERROR)",
        "max(1 - sequence_kl / target, -MAX_ERROR)",
    ),
    (
        "the controller's error is not clamped from above",
        "min(max(sequence_kl / target - 1, -MAX_ERROR), MAX_ERROR)",
        "max(sequence_kl / target - 1, -MAX_ERROR)",
    ),
    (
        "the controller's error is not clamped from below",
        "max(sequence_kl / target - 1, -MAX_ERROR)",
        "sequence_kl / target - 1",
    ),
    ("the controller ignores how many episodes went by", "error * num_episodes / horizon", "error / horizon"),
    (
        "the ratio of the KL in the loss is always 1",
        "rho = ratio(new_logprobs, logprobs)",
        "rho = ratio(new_logprobs, new_logprobs.detach())",
    ),
    ("the controller's error is not relative to the target", "sequence_kl / target - 1", "sequence_kl - target"),
    tests=("tests/algo/test_kl.py",),
)

LOGPROBS = in_file(
    "algo/logprobs.py",
    ("the temperature is missing", "scaled if temperature == 1 else scaled / temperature", "scaled"),
    ("the temperature is missing in the gradient", ".div_(ctx.temperature)", ""),
    ("the softmax is taken in half precision", "scaled = wide(logits)", "scaled = logits"),
    (
        "the entropy is that at temperature 1",
        "_finite(of_chunk).exp().mul_(of_chunk)",
        "_all_logprobs(logits[chunk], 1).exp().mul_(_all_logprobs(logits[chunk], 1))",
    ),
    ("the entropy is negative", ".sum(dim=-1).neg_()", ".sum(dim=-1)"),
    (
        "the entropy is the surprise of the token that was drawn",
        "entropy[chunk] = _finite(of_chunk).exp().mul_(of_chunk).sum(dim=-1).neg_()",
        "entropy[chunk] = -logprobs[chunk]",
    ),
    (
        "a token of probability 0 makes the entropy NaN",
        "return logprobs.clamp_(min=torch.finfo(logprobs.dtype).min)",
        "return logprobs",
    ),
    (
        "no gradient flows through the normaliser",
        "probs.mul_(-chosen if entropy_factors is None else entropy_factors.sub_(chosen))",
        "probs.zero_()",
    ),
    (
        "the gradient lacks the token that was drawn",
        "return probs.scatter_add_(-1, targets.unsqueeze(-1), chosen)",
        "return probs",
    ),
    (
        "the normaliser overflows",
        "(scaled if temperature == 1 else scaled / temperature).log_softmax(dim=-1)",
        "(x := scaled / temperature) - x.exp().sum(dim=-1, keepdim=True).log()",
    ),
    (
        "the entropy's gradient lacks that of the probabilities",
        "factors = of_chunk.add_(entropy[chunk].unsqueeze(-1))",
        "factors = torch.ones_like(of_chunk)",
    ),
    (
        "logits of all tokens are kept for the backward pass",
        "checkpoint(of_chunk, hidden[chunk], targets[chunk], use_reentrant=False)",
        "of_chunk(hidden[chunk], targets[chunk])",
    ),
    ("of a linear head the temperature is missing", "z if self.temperature == 1 else z.div_(self.temperature)", "z"),
    ("of a linear head the temperature is missing in the gradient", ".div_(how.temperature)", ""),
    (
        "of a linear head the softmax is taken in half precision",
        "z = wide(self.multiply(rows, weight, bias))",
        "z = self.multiply(rows, weight, bias)",
    ),
    (
        "a linear head multiplies in float32 whatever autocast says",
        "dtype = torch.get_autocast_dtype(device)",
        "pass",
    ),
    (
        "of a linear head the entropy's probabilities are not divided by their sum",
        "total.log() - odds.mul_(z).sum(dim=-1) / total",
        "total.log() - odds.mul_(z).sum(dim=-1)",
    ),
    (
        "of a linear head the backward pass has another normaliser",
        "log_sums[chunk] = highest.squeeze(-1) + total.log()",
        "log_sums[chunk] = total.log()",
    ),
    (
        "the probabilities that a linear head keeps are not divided by their sum",
        "ctx.kept = odds.div_(total.unsqueeze(-1))",
        "ctx.kept = odds",
    ),
    (
        "a second backward pass through a linear head begins with what the first one left",
        "probs, ctx.kept, factors = ctx.kept, None, None",
        "probs, ctx.kept, factors = ctx.kept if chunk.stop == len(hidden) else None, ctx.kept, None",
    ),
    (
        "the weights of a linear head learn from the first chunk alone",
        "_add_product(of_weight, grad.t(), rows[chunk].t(), how.multiply)",
        "of_weight = grad.t() @ rows[chunk]",
    ),
    ("the bias of a linear head learns from the first chunk alone", "of_bias += grad", "of_bias = grad"),
    (
        "the entropy's gradient through a linear head lacks that of the probabilities",
        "z.add_(entropy[chunk].unsqueeze(-1)).mul_(",
        "torch.ones_like(z).mul_(",
    ),
    (
        "a token that a linear head makes impossible makes the entropy NaN",
        "z.clamp_(min=torch.finfo(z.dtype).min).exp() if",
        "z.exp() if",
    ),
    (
        "of a product that is added in parts the last is missing",
        "range(0, len(total), step)",
        "range(0, len(total) - step, step)",
    ),
    tests=("tests/algo/test_logprobs.py",),
)

LOSSES = in_file(
    "algo/losses.py",
    ("the ratio is upside down", "(wide(new_logprobs) - wide(logprobs))", "(wide(logprobs) - wide(new_logprobs))"),
    ("the ratio is taken in half precision", "(wide(new_logprobs) - wide(logprobs))", "wide(new_logprobs - logprobs)"),
    ("the ratio overflows", ".clamp(-20, 20).exp()", ".exp()"),
    ("the ratio carries no gradient", ".clamp(-20, 20).exp()", ".clamp(-20, 20).exp().detach()"),
    (
        "the surrogate is maximised",
        "torch.maximum(-advantages * rho, -advantages * rho.clamp(",
        "torch.minimum(advantages * rho, advantages * rho.clamp(",
    ),
    (
        "the smaller branch of the surrogate is taken",
        "torch.maximum(-advantages * rho",
        "torch.minimum(-advantages * rho",
    ),
    ("the surrogate is not clipped below", "rho.clamp(1 - cliprange, 1 + high)", "rho.clamp(max=1 + high)"),
    ("the surrogate is not clipped above", "rho.clamp(1 - cliprange, 1 + high)", "rho.clamp(min=1 - cliprange)"),
    ("the clip's two sides are swapped", "rho.clamp(1 - cliprange, 1 + high)", "rho.clamp(1 - high, 1 + cliprange)"),
    (
        "the dual clip holds for good tokens",
        "torch.where(advantages < 0, torch.minimum(loss",
        "torch.where(advantages > 0, torch.minimum(loss",
    ),
    (
        "the dual clip raises the loss",
        "torch.minimum(loss, -advantages * dual_clip)",
        "torch.maximum(loss, -advantages * dual_clip)",
    ),
    (
        "tokens clipped below are those with a good advantage",
        "(advantages < 0) & (rho < 1 - cliprange)",
        "(advantages > 0) & (rho < 1 - cliprange)",
    ),
    (
        "tokens clipped above are counted whatever their advantage",
        "(advantages > 0) & (rho > 1 + high)",
        "rho > 1 + high",
    ),
    ("tokens clipped above are counted by the range below", "(rho > 1 + high)", "(rho > 1 + cliprange)"),
    ("the value loss lacks its half", "torch.maximum(plain, limited) / 2", "torch.maximum(plain, limited)"),
    (
        "the smaller branch of the value loss is taken",
        "torch.maximum(plain, limited) / 2",
        "torch.minimum(plain, limited) / 2",
    ),
    ("the value loss is clipped alone", "torch.maximum(plain, limited) / 2", "limited / 2"),
    (
        "the value clip lies around the return",
        "new_values.clamp(values - cliprange_value, values + cliprange_value)",
        "new_values.clamp(returns - cliprange_value, returns + cliprange_value)",
    ),
    ("the value loss has no clip", "if cliprange_value is None:", "if True:"),
    ("the ratio is bounded where updates go", ".clamp(-20, 20).exp()", ".clamp(-1, 1).exp()"),
    tests=("tests/algo/test_losses.py", "tests/algo/test_padding.py", HOLES),
)

MASKING = in_file(
    "algo/masking.py",
    ("the mask holds one token too many", "device=lengths.device) < lengths", "device=lengths.device) <= lengths"),
    (
        "the mask lacks the end token",
        "device=lengths.device) < lengths.unsqueeze(1)",
        "device=lengths.device) < lengths.unsqueeze(1) - 1",
    ),
    ("padding is multiplied by 0 in sums", "torch.where(mask, x, torch.zeros_like(x)).sum(dim)", "(x * mask).sum(dim)"),
    ("means divide by the padding too", "masked_sum(x, mask) / mask.sum()", "masked_sum(x, mask) / mask.numel()"),
    (
        "the variance is unbiased",
        "(x - masked_mean(x, mask)).square(), mask)",
        "(x - masked_mean(x, mask)).square(), mask) * mask.sum() / (mask.sum() - 1)",
    ),
    ("whitening shifts the mean where it should be kept", "white + mean if keep_mean else white", "white"),
    (
        "whitening adds the mean back where it should be gone",
        "white + mean if keep_mean else white",
        "white if keep_mean else white + mean",
    ),
    (
        "whitening divides by the variance",
        "torch.rsqrt(var + WHITEN_EPSILON)",
        "torch.reciprocal(var + WHITEN_EPSILON)",
    ),
    ("whitening a constant gives NaN", "torch.rsqrt(var + WHITEN_EPSILON)", "torch.rsqrt(var)"),
    ("whitening in half precision", "    x = wide(x)\n", ""),
    tests=("tests/algo/test_masking.py",),
)

REDUCTION = in_file(
    "algo/reduction.py",
    ("a sequence mean divides by the padding too", "mask.sum(dim=1).clamp(min=1)", "mask.shape[1]"),
    ("answers without a token make the loss NaN", "mask.sum(dim=1).clamp(min=1)", "mask.sum(dim=1)"),
    ("a token mean weighs answers alike", 'if how == "sequence_mean":', 'if how != "fixed_length":'),
    ("the loss counts padding", "masked_sum(wide(losses), mask, dim=1)", "wide(losses).sum(dim=1)"),
    ("the token count holds the padding", "count = mask.sum()", "count = (mask | True).sum()"),
    (
        "a fixed length counts answers that take no part",
        "mask.any(dim=1).sum() * max_length",
        "(mask.any(dim=1) | True).sum() * max_length",
    ),
    ("a fixed length is that of the micro-batch", "* max_length", "* mask.shape[1]"),
    tests=("tests/algo/test_reduction.py", "tests/algo/test_padding.py"),
)

SCORES = in_file(
    "algo/scores.py",
    ("the penalty for a missing end is added", "scores - (penalty or 0.0)", "scores + (penalty or 0.0)"),
    ("the score of a missing end is added", "torch.full_like(scores, replacement)", "scores + replacement"),
    (
        "the penalty falls on answers that ended",
        "torch.where(ended, scores, scores - ",
        "torch.where(~ended, scores, scores - ",
    ),
    (
        "the fixed score is that of answers that ended",
        "torch.where(ended, scores, torch.full_like",
        "torch.where(~ended, scores, torch.full_like",
    ),
    ("a fixed score of 0 is taken for none", "if replacement is not None:", "if replacement:"),
    (
        "the overlong penalty rewards",
        "(max_length - buffer - lengths) / buffer",
        "(lengths + buffer - max_length) / buffer",
    ),
    (
        "the overlong penalty starts at the longest length",
        "(max_length - buffer - lengths) / buffer",
        "(max_length - lengths) / buffer",
    ),
    ("the overlong penalty has no floor", ".clamp(-1.0, 0.0)", ".clamp(max=0.0)"),
    (
        "merged moments forget the gap between the means",
        "moments.count * moments.var + gap**2 * moments.count * len(values) / count",
        "moments.count * moments.var",
    ),
    ("merged moments have an unbiased variance", "squares / count)", "squares / max(count - 1, 1))"),
    (
        "normalised scores are divided by the variance",
        "math.sqrt(moments.var + WHITEN_EPSILON)",
        "(moments.var + WHITEN_EPSILON)",
    ),
    (
        "normalised scores are those of the batch",
        "(wide(scores) - moments.mean)",
        "(wide(scores) - wide(scores).mean())",
    ),
    (
        "merged moments forget how many scores went before",
        "squares += moments.count * moments.var",
        "squares += moments.var",
    ),
    (
        "the variance of scores far from 0 loses its digits",
        "math.fsum((value - mean) ** 2 for value in values)",
        "math.fsum(value**2 for value in values) - len(values) * mean**2",
    ),
    tests=("tests/algo/test_scores.py",),
)

FORWARD = in_file(
    "models/forward.py",
    (
        "log-probabilities and values are read one position late",
        "hidden.flatten(0, 1).index_select(0, batch.response_index - 1)",
        "hidden.flatten(0, 1).index_select(0, batch.response_index)",
    ),
    (
        "log-probabilities and values are read one position early",
        "hidden.flatten(0, 1).index_select(0, batch.response_index - 1)",
        "hidden.flatten(0, 1).roll(1, 0).index_select(0, batch.response_index - 1)",
    ),
    (
        "the scored token is the one before",
        "batch.token_ids.flatten().index_select(0, batch.response_index)",
        "batch.token_ids.flatten().index_select(0, batch.response_index - 1)",
    ),
    ("the attention mask comes from ids", '"attention_mask": mask.long()', '"attention_mask": (ids != 0).long()'),
    ("padding is attended to", '"attention_mask": mask.long()', '"attention_mask": torch.ones_like(ids)'),
    ("position ids are left to the model", "position_ids} if placed", "position_ids} if not placed"),
    ("padding before a row is not masked", "if not needs_mask:", "if True:"),
    ("a mask is given where nothing needs one", "if not needs_mask:", "if False:"),
    ("a model that reads what follows is taken", "difference.norm() > most", "difference.norm() > 1e9 + most"),
    (
        "what all states share hides what follows",
        "states_before - states_before.mean(dim=1, keepdim=True)",
        "states_before",
    ),
    ("a judge that reads what follows has no mask", "not (causal and bool(mask[:, 0].all()))", "not mask[:, 0].all()"),
    (
        "the first of all logits are taken for those that were to be kept",
        "logits = logits[:, kept]",
        "logits = logits[:, : len(kept)]",
    ),
    (
        "the temperature is missing where the head matches",
        'how = {"temperature": temperature, ',
        'how = {"temperature": 1.0, ',
    ),
    (
        "the temperature is missing where the model makes its own logits",
        "logits, _targets(batch), temperature=temperature",
        "logits, _targets(batch), temperature=1.0",
    ),
    ("a detached head still trains the trunk", "head(states.detach() if detach_head else states)", "head(states)"),
    ("a head never trains the trunk", "head(states.detach() if detach_head else states)", "head(states.detach())"),
    ("a sentinel stands in the padding", "flat.new_zeros(shape", "flat.new_ones(shape"),
    (
        "the score is read where the longest row ends",
        "(mask * columns).argmax(dim=1)",
        "torch.full_like(ids[:, 0], ids.shape[1] - 1)",
    ),
    (
        "the score is read where a row ends that is padded on the right",
        "(mask * columns).argmax(dim=1)",
        "mask.sum(dim=1) - 1",
    ),
    (
        "the score is read one token before the last",
        "(mask * columns).argmax(dim=1)",
        "(mask * columns).argmax(dim=1) - 1",
    ),
    (
        "a small cap of the logits is not seen",
        "torch.equal(logits.float(), head(states).float())",
        "torch.allclose(logits.float(), head(states).float(), atol=1e-4)",
    ),
    (
        "a cap or scale of the logits is ignored",
        "torch.equal(logits.float(), head(states).float())",
        "logits.shape == head(states).shape",
    ),
    (
        "the states of a model that makes its own logits are those after next",
        "seen[0].flatten(0, 1).index_select(0, sampled_in)",
        "seen[0].flatten(0, 1).index_select(0, sampled_in + 1)",
    ),
    (
        "the values alone are read one position late",
        "head(_response_states(backbone, batch)).squeeze(-1)",
        "head(_response_states(backbone, batch)).squeeze(-1).roll(-1)",
    ),
    tests=("tests/models/test_forward.py",),
)

COLLATE = in_file(
    "data/collate.py",
    ("queries are padded on the right", "(width - len(ids), ids) for ids", "(0, ids) for ids"),
    ("rows of a micro-batch are padded on the left", "_padded([(0, [*q, *r])", "_padded([(9 - len(r), [*q, *r])"),
    (
        "the end token is masked out",
        "mask[row, start : start + len(ids)] = True",
        "mask[row, start : start + len(ids) - 1] = True",
    ),
    (
        "the response mask comes from ids",
        "_, response_mask = _padded([(0, response)",
        "_, response_mask = _padded([(0, [x for x in response if x != 0])",
    ),
    (
        "a response's first column is not its first token",
        "_, response_mask = _padded([(0, response)",
        "_, response_mask = _padded([(1, response)",
    ),
    (
        "the order of rows is lost in micro-batches",
        "if rows is None else tuple(rows)",
        "if rows is None or rows else ()",
    ),
    (
        "positions count the padding",
        "(torch.arange(mask.shape[1]) - first)",
        "torch.arange(mask.shape[1]).expand(mask.shape)",
    ),
    ("positions start at 1", "- first).clamp(min=0)", "- first).clamp(min=0) + 1"),
    (
        "a micro-batch that is not full is lost",
        "[tuple(group) for group in groups]",
        "[tuple(group) for group in groups if len(group) == size or len(groups) == 1]",
    ),
    ("a budget counts tokens as if none were padded", "lengths[groups[-1][0] if groups else row]", "lengths[row]"),
    ("micro-batches may be one row over the budget", "num_rows // num_parts", "(num_rows - 1) // num_parts"),
    ("micro-batches are one row under their size", "num_rows > size", "num_rows >= size"),
    ("a budget is for the parts of all processes", "-(-num_rows // num_parts)", "num_rows"),
    ("memory peaks in the last micro-batch", "(-lengths[row], ", "(lengths[row], "),
    tests=("tests/data/test_collate.py",),
)

STREAM = in_file(
    "data/stream.py",
    (
        "every epoch has the same order",
        'noise_key(self.seed, "order", epoch, 0)',
        'noise_key(self.seed, "order", 0, 0)',
    ),
    (
        "the order of prompts ignores the seed",
        'noise_key(self.seed, "order", epoch, 0)',
        'noise_key(0, "order", epoch, 0)',
    ),
    (
        "the order of prompts comes from the global random state",
        "randperm(self.num_prompts, generator=generator)",
        "randperm(self.num_prompts)",
    ),
    (
        "prompts are drawn with replacement",
        "torch.randperm(self.num_prompts, generator",
        "torch.randint(self.num_prompts, (self.num_prompts,), generator",
    ),
    (
        "prompts are never shuffled",
        "torch.randperm(self.num_prompts, generator=generator)",
        "torch.arange(self.num_prompts)",
    ),
    (
        "an answer does not know how often its prompt was drawn",
        "k // self.num_prompts) for k in draws]",
        "0) for k in draws]",
    ),
    (
        "the rest of an epoch is left out",
        "range(i * self.batch_size, (i + 1) * self.batch_size)",
        "range(i * self.num_prompts, i * self.num_prompts + self.batch_size)",
    ),
    tests=("tests/data/test_stream.py",),
)

KEYS = in_file(
    "types.py",
    ("noise ignores the sample's number", "{seed}/{stream}/{prompt}/{sample}", "{seed}/{stream}/{prompt}"),
    ("noise ignores the prompt", "{seed}/{stream}/{prompt}/{sample}", "{seed}/{stream}/{sample}"),
    ("evaluation has the noise of training", "{seed}/{stream}/{prompt}/{sample}", "{seed}/{prompt}/{sample}"),
    ("noise ignores the seed", "{seed}/{stream}/{prompt}/{sample}", "{stream}/{prompt}/{sample}"),
    ("noise differs from process to process", 'int.from_bytes(digest, "big") >> 1', "hash(digest) & (2**63 - 1)"),
    ("parts of a noise key run into each other", "{seed}/{stream}/{prompt}/{sample}", "{seed}{stream}{prompt}{sample}"),
    tests=(HOLES,),
)

COLUMNS = in_file(
    "types.py",
    ("the last token of a query is response", "self.attention_mask & (real >", "self.attention_mask & (real + 1 >"),
    ("the first token of a response is no response", "real > real[:, -1:]", "real > real[:, -1:] + 1"),
    ("padding behind a response is response", "return self.attention_mask & (real >", "return (real >"),
    tests=("tests/data/test_collate.py",),
)

REDUCE = in_file(
    "metrics/reduce.py",
    (
        "a mean over micro-batches is a mean of their means",
        "means = {n: sums[n][1] / sums[n][0] for n",
        "means = {n: (parts[n][:, 1] / parts[n][:, 0]).mean() for n",
    ),
    (
        "a metric's count holds the padding",
        "count, total = mask.sum().to(x)",
        "count, total = torch.ones_like(mask).sum().to(x)",
    ),
    ("a metric's sum holds the padding", "torch.where(mask, x, zero).sum()\n", "x.sum()\n"),
    (
        "a variance forgets the gap between micro-batches",
        "(squares + counts * (totals / counts.clamp(min=1) - mean).square()).sum()",
        "squares.sum()",
    ),
    ("a variance is unbiased", "squares[n] / sums[n][0]", "squares[n] / (sums[n][0] - 1)"),
    ("a maximum holds the padding", "x if mask is None else torch.where(mask, x, nothing)", "x"),
    ("an empty micro-batch makes a variance NaN", "counts.clamp(min=1)", "counts"),
    tests=("tests/metrics/test_reduce.py",),
)

GENERATION = in_file(
    "generation/batch.py",
    (
        "sampling lacks the temperature",
        "scaled if sampling.temperature == 1 else scaled / sampling.temperature",
        "scaled",
    ),
    (
        "the sampler's log-probabilities are those at temperature 1",
        "tokens, scaled.gather(1, tokens[:, None])[:, 0] - normaliser",
        "tokens, logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]",
    ),
    ("the Gumbel noise has the wrong sign", "weights.div_(negated)", "weights.mul_(negated)"),
    ("the noise comes from the global random state", "row.random_(generator=generator)", "row.random_()"),
    ("every answer has the same noise", "manual_seed(request.key)", "manual_seed(0)"),
    ("the noise depends on the place in the batch", "manual_seed(request.key)", "manual_seed(request.key + i)"),
    (
        "the logits are drawn from in half precision",
        "logits if logits.dtype == torch.float64 else logits.float()",
        "logits",
    ),
    (
        "positions stand still while decoding",
        "self._inputs, self._positions = added, self._positions[:, -1:] + 1",
        "self._inputs, self._positions = added, self._positions[:, -1:]",
    ),
    (
        "padding is attended to while decoding",
        '{"attention_mask": self._mask[:, :end]}',
        '{"attention_mask": torch.ones_like(self._mask[:, :end])}',
    ),
    (
        "rows are dropped from the cache in the wrong places",
        "[self._slots[i] for i in kept]",
        "list(range(len(kept)))",
    ),
    (
        "the cache keeps the rows that ended",
        "self._cache.reorder_cache(indices)",
        "self._cache.reorder_cache(indices * 0)",
    ),
    (
        "answers come back in the order of decoding",
        "[(row.position, row.completion(self._sampling)) for row in finished]",
        "[(i, row.completion(self._sampling)) for i, row in enumerate(finished)]",
    ),
    (
        "unlikely tokens are never drawn",
        "scaled if sampling.temperature == 1 else scaled / sampling.temperature",
        "(scaled / sampling.temperature).where(scaled > scaled.amax(-1, keepdim=True) - 2, -torch.inf)",
    ),
    ("top-k keeps one token too few", "scaled < least", "scaled <= least"),
    ("top-p drops the token that reaches the sum", "before >= ", "before + probabilities >= "),
    (
        "log-probabilities are those of the truncated distribution",
        "largest[:, 0] + weights.sum(dim=-1).log_()",
        "_truncated(scaled, sampling).logsumexp(dim=-1)",
    ),
    tests=(
        "tests/generation/test_caches.py::test_what_the_cache_allows_is_told_and_kept_to",
        "tests/generation/test_hf.py",
        "tests/generation/test_contract.py",
    ),
)

DRAFT = in_file(
    "generation/draft.py",
    (
        "the end token at the limit is taken for a cut",
        "stopped = sampling.stops(self.token_ids, self.before)\n",
        "stopped = len(self.token_ids) < sampling.max_new_tokens\n",
    ),
    (
        "the end token is dropped from the answer",
        "Completion(self.token_ids, ",
        "Completion(self.token_ids[: -1 if stopped else None] or self.token_ids, ",
    ),
    (
        "an answer may have one token too many",
        "len(self.token_ids) == sampling.max_new_tokens\n",
        "len(self.token_ids) == sampling.max_new_tokens + 1\n",
    ),
    tests=("tests/generation/test_hf.py", "tests/generation/test_contract.py"),
)

DECODING = in_file(
    "generation/decoding.py",
    ("a cache that looks as if it could be cut is trusted", "or _is_faithful(model, device, way)", "or True"),
    ("no cache is trusted", "or _is_faithful(model, device, way)", "or False"),
    ("a cache of fixed size is trusted", "and not _is_faithful(model, device, Decoding.FIXED)", "and False"),
    ("caches are not tried with padding", "ids[:2] if way.may_pad", "ids[:-4] if way.may_pad"),
    ("the end of a text is never tried", "if step == 1:", "if step == 9:"),
    (
        "what crashes on trial crashes the run",
        "    except FAULTS:\n        return False",
        "    except KeyError:\n        return False",
    ),
    tests=("tests/generation/test_caches.py",),
)

TRAINER = (
    *in_file(
        "train/trainer.py",
        (
            "every update answers the first prompts",
            "self.stream.batch(self.state.step), self",
            "self.stream.batch(0), self",
        ),
        (
            "the answers to a prompt are not in neighboring rows",
            "for i, draw in draws for sample in range(each)]",
            "for sample in range(each) for i, draw in draws]",
        ),
        ("the answers to a prompt share their noise", "draw * each + sample) for", "draw * each) for"),
        ("a prompt gets the same noise each epoch", "draw * each + sample) for", "sample) for"),
        (
            "training has the noise of evaluation",
            'self.config.train.seed, "train", prompt.row',
            'self.config.train.seed, "eval", prompt.row',
        ),
        ("training noise ignores the seed", 'noise_key(self.config.train.seed, "train"', 'noise_key(0, "train"'),
        tests=(f"{BOOKKEEPING}::test_no_two_answers_of_a_run_share_their_noise",),
    ),
    *in_file(
        "train/norms.py",
        (
            "frozen score moments have the noise of training",
            'noise_key(seed, "score_norm", ',
            'noise_key(seed, "train", ',
        ),
        tests=(f"{BOOKKEEPING}::test_scores_are_frozen_on_answers_of_their_own",),
    ),
    *in_file(
        "train/trainer.py",
        (
            "the engine never gets the trained weights",
            "            self.parts.generator.sync_weights(self.roles.policy)\n        return self.finish",
            "        return self.finish",
        ),
        tests=(f"{BOOKKEEPING}::test_the_engine_has_the_weights_of_the_last_update",),
    ),
    *in_file(
        "train/trainer.py",
        (
            "a stop between two updates takes the generators back",
            "                    self.before = random_states()\n                    self.stop.agree()\n",
            "                    self.stop.agree()\n",
        ),
        tests=("tests/faults/test_state.py::test_the_generators_that_reward_functions_draw_from_go_on",),
    ),
    *in_file(
        "train/trainer.py",
        (
            "the coefficient falls while the policy stands still",
            '"objective/kl" in metrics and not is_warming_up',
            '"objective/kl" in metrics',
        ),
        (
            "the coefficient waits an update too long",
            "self.state.step < self.config.value.warmup_steps\n        if ppo.kl_target",
            "self.state.step <= self.config.value.warmup_steps\n        if ppo.kl_target",
        ),
        tests=(f"{BOOKKEEPING}::test_the_coefficient_waits_while_the_policy_does",),
    ),
    *in_file(
        "algo/scores.py",
        ("the KL of a batch without signal is ten thousand times it", "if var > WHITEN_EPSILON", "if var >= 0"),
        ("the KL in the loss is never divided", "if var > WHITEN_EPSILON", "if var < 0"),
        tests=("tests/train/test_experience.py",),
    ),
    *in_file(
        "train/update.py",
        (
            "an update that ran out of memory in a step is begun anew",
            "                    with self.changing():\n                        self.take_step(optimizer)\n",
            "                    self.take_step(optimizer)\n",
        ),
        (
            "an update that ran out of memory after a step is begun anew",
            "                    with self.changing():\n                        raise\n",
            "                    raise\n",
        ),
        (
            "demonstrations are not halved where answers are alone",
            "if shows_one and all(len",
            "if all(len",
        ),
        tests=(
            "tests/faults/test_memory.py::test_what_has_changed_weights_is_not_begun_anew",
            "tests/faults/test_memory.py::test_demonstrations_are_halved_until_they_fit",
        ),
    ),
    *in_file(
        "train/trainer.py",
        (
            "the learning rate follows the score's negative",
            'optimizer.note(values["objective/scores"])',
            'optimizer.note(-values["objective/scores"])',
        ),
        tests=(f"{BOOKKEEPING}::test_a_schedule_that_follows_a_metric_follows_the_score",),
    ),
    *in_file(
        "train/trainer.py",
        (
            "evaluation is of the policy and not of its average",
            "with self.average.applied():",
            'with timed(Metrics(), "", self.dist.device):',
        ),
        tests=(f"{BOOKKEEPING}::test_evaluations_and_the_result_are_those_of_the_average",),
    ),
    *in_file(
        "train/trainer.py",
        (
            "a resumed run measures its frozen score moments anew",
            '"frozen" and self.state.score_moments.count == 0',
            '"frozen"',
        ),
        tests=(f"{BOOKKEEPING}::test_a_resumed_run_has_the_statistics_of_the_one_before[frozen moments]",),
    ),
    *in_file(
        "train/trainer.py",
        (
            "the controller looks at the KL of tokens",
            'metrics["objective/kl"],',
            'metrics["objective/kl"] / metrics["rollout/length"],',
        ),
        tests=(f"{BOOKKEEPING}::test_the_coefficient_follows_the_kl_of_whole_answers",),
    ),
    *in_file(
        "train/trainer.py",
        (
            "the reference is the policy that is trained",
            'refs = of_all(REFERENCE, "reference", partial(self.roles.ref_logprobs, temperature=temperature))',
            "refs = [out.logprobs for out in seen]",
        ),
        (
            "old log-probabilities lack the temperature",
            "partial(score, temperature=temperature, passes=[pass_])",
            "partial(score, temperature=1.0, passes=[pass_])",
        ),
        (
            "the reference's log-probabilities lack the temperature",
            "partial(self.roles.ref_logprobs, temperature=temperature)",
            "partial(self.roles.ref_logprobs, temperature=1.0)",
        ),
        ("the KL is in the loss too where it is in the reward", 'kl_coef if ppo.kl_in == "loss" else 0.0', "kl_coef"),
        tests=whole_step("k3, temperature, gamma, lambda, head"),
    ),
    *in_file(
        "train/trainer.py",
        (
            "running score moments are not kept",
            "self.state.score_moments = moments\n        self.steer_kl",
            "self.steer_kl",
        ),
        (
            "scores are normalised by those of the batch",
            "algo.merged_moments(moments, raw)",
            "algo.merged_moments(algo.ScoreMoments(), raw)",
        ),
        tests=whole_step("running moments, penalty, overlong, head"),
    ),
    *in_file(
        "train/trainer.py",
        (
            "frozen score moments are those of all scores",
            'if self.config.ppo.score_norm == "running":',
            "if self.config.ppo.score_norm is not None:",
        ),
        (
            "answers that were cut train, the others do not",
            "outputs.mask & answers.ended",
            "outputs.mask & ~answers.ended",
        ),
        (
            "answers that were cut train though they should not",
            "if ppo.mask_truncated else outputs.mask",
            "if False else outputs.mask",
        ),
        tests=whole_step("frozen moments, fixed score, overlong, cut answers masked, head"),
    ),
    *in_file(
        "train/trainer.py",
        ("the KL coefficient is never steered", "        self.steer_kl(values)\n", ""),
        (
            "the KL coefficient that is steered is not used",
            "self.config, self.config.ppo, self.state.kl_coef",
            "self.config, self.config.ppo, self.config.ppo.kl_coef",
        ),
        ("the controller looks at k3", 'metrics["objective/kl"],', 'metrics["objective/kl_k3"],'),
        (
            "the controller starts anew each update",
            "                self.state.kl_coef,\n                metrics",
            "                ppo.kl_coef,\n                metrics",
        ),
        (
            "the controller counts updates instead of episodes",
            "num_episodes=self.config.train.rollout_batch_size",
            "num_episodes=1",
        ),
        tests=whole_step("adaptive coefficient, head"),
    ),
    *in_file(
        "train/trainer.py",
        ("the moving average is never updated", "self.average.update()", "pass"),
        tests=whole_step("moving average, head"),
    ),
)

UPDATE = (
    *in_file(
        "train/update.py",
        ("the smallest micro-batch of a step comes first", "key=num_places, reverse=True)", "key=num_places)"),
        tests=("tests/train/test_release.py",),
    ),
    *in_file(
        "train/update.py",
        (
            "an update that went too far goes on",
            "                if not (stopped or is_bad):\n                    self.phase",
            "                if not is_bad:\n                    self.phase",
        ),
        tests=(f"{BOOKKEEPING}::test_no_step_follows_one_that_went_too_far",),
    ),
    *in_file(
        "train/update.py",
        (
            "the drift that stops an update is a mean over padding",
            "algo.approx_kl(new.logprobs.detach(), old.logprobs), mask)",
            "algo.approx_kl(new.logprobs.detach(), old.logprobs))",
        ),
        tests=(f"{BOOKKEEPING}::test_an_update_stops_where_the_mean_over_its_tokens_is_too_large",),
    ),
    *in_file(
        "train/update.py",
        (
            "the loss is divided by the tokens of one micro-batch",
            "torch.stack(parts).sum()",
            "torch.stack(parts).mean()",
        ),
        (
            "the loss is divided by the padding too",
            "algo.normaliser(item.loss_mask, how",
            "algo.normaliser(item.loss_mask | True, how",
        ),
        (
            "gradients are clipped before all are there",
            "self.engine.backward(optimizer.scaled(total / normaliser.to(total)), pass_.name)",
            "self.engine.backward(total / normaliser.to(total), pass_.name), [o.clip() for o in self.optimizers]",
        ),
        ("the value loss of a shared trunk has weight 1", "optimizer.value_weight", "1.0"),
        (
            "old log-probabilities are those of the policy being updated",
            "                old.logprobs,\n                old.advantages,\n                cliprange",
            "                new.logprobs.detach(),\n                old.advantages,\n                cliprange",
        ),
        (
            "the policy learns returns",
            "                old.advantages,\n                cliprange",
            "                old.returns,\n                cliprange",
        ),
        (
            "the critic learns advantages",
            "algo.value_loss(new.values, old.values, old.returns",
            "algo.value_loss(new.values, old.values, old.advantages",
        ),
        tests=whole_step("defaults, head"),
    ),
    *in_file(
        "train/engines/replicated.py",
        ("the gradient's norm is not clipped", "norm = optimizer.clip()", "norm = 0.0"),
        tests=whole_step("defaults, head"),
    ),
    *in_file(
        "train/update.py",
        (
            "the value loss of a critic of its own is scaled",
            "optimizer.value_weight",
            "ppo.vf_coef",
        ),
        tests=whole_step("defaults, own critic"),
    ),
    *in_file(
        "train/update.py",
        (
            "new log-probabilities lack the temperature",
            "temperature=self.config.sampling.temperature, with_entropy",
            "temperature=1.0, with_entropy",
        ),
        tests=whole_step("k3, temperature, gamma, lambda, head"),
    ),
    *in_file(
        "train/update.py",
        (
            "the value clip lies around the new value",
            "algo.value_loss(new.values, old.values, ",
            "algo.value_loss(new.values, new.values.detach(), ",
        ),
        tests=whole_step("rewards whitened, tight clips, head"),
    ),
    *in_file(
        "train/update.py",
        (
            "the loss is divided by tokens that take no part",
            "algo.normaliser(item.loss_mask, how",
            "algo.normaliser(item.batch.response_mask, how",
        ),
        (
            "tokens that take no part are in the loss",
            "algo.reduced(x, item.loss_mask",
            "algo.reduced(x, item.batch.response_mask",
        ),
        tests=whole_step("frozen moments, fixed score, overlong, cut answers masked, head"),
    ),
    *in_file(
        "train/update.py",
        (
            "the fixed length of the loss is that of the micro-batch",
            "max_length=self.config.sampling.response_length)",
            "max_length=item.loss_mask.shape[1])",
        ),
        tests=whole_step("fixed length, mini-batches, head"),
    ),
    *in_file(
        "train/update.py",
        (
            "the loss is a token mean whatever is asked for",
            "algo.reduced(x, item.loss_mask, how=ppo.loss_reduction)",
            'algo.reduced(x, item.loss_mask, how="token_mean")',
        ),
        tests=whole_step("mean over answers, head"),
    ),
    *in_file(
        "train/update.py",
        ("the KL in the loss has no coefficient", '"kl_loss": item.kl_loss_coef', '"kl_loss": 1.0'),
        ("the KL in the loss is maximised", '"kl_loss": item.kl_loss_coef', '"kl_loss": -item.kl_loss_coef'),
        (
            "the KL in the loss is not weighted by the drift",
            "algo.kl_loss(new.logprobs, old.logprobs, ",
            "algo.kl_loss(new.logprobs, new.logprobs.detach(), ",
        ),
        tests=whole_step("KL k3 in the loss, no whitening, head"),
    ),
    *in_file(
        "train/update.py",
        ("the entropy is minimised", '"entropy": -ppo.entropy_coef', '"entropy": ppo.entropy_coef'),
        tests=whole_step("entropy, temperature, head"),
    ),
    *in_file(
        "train/update.py",
        ("the clip's upper side is ignored", "cliprange_high=ppo.cliprange_high", "cliprange_high=None"),
        ("the dual clip is ignored", "dual_clip=ppo.dual_clip", "dual_clip=None"),
        tests=whole_step("upper clip, dual clip, head"),
    ),
    *in_file(
        "train/update.py",
        (
            "the step that goes too far is taken",
            "if gradients is Gradients.FIT:\n                    with self.changing",
            "if gradients in (Gradients.FIT, Gradients.TOO_FAR):\n                    with self.changing",
        ),
        (
            "a step that is left out leaves its gradient behind",
            "                    self.engine.skip(optimizer)\n",
            "                    pass\n",
        ),
        ("steps that were left out are counted", "float(is_whole)", "1.0"),
        ("an update stops where every limit is passed", "return any(limit is not None", "return all(limit is not None"),
        ("an update stops where the policy stayed near", "moved[name] > limit", "moved[name] < limit"),
        tests=whole_step("early stop by KL, head"),
    ),
    *in_file(
        "train/update.py",
        (
            "a mini-batch that is not finite trains",
            "if gradients is Gradients.FIT:\n                    with self.changing",
            "if gradients is Gradients.FIT or (is_bad and not stopped):\n                    with self.changing",
        ),
        ("numbers of a mini-batch that is not finite are logged", "with self.metrics.attempt():", "if True:"),
        ("gradients are not looked at before a step", "self.engine.are_finite(optimizer)", "True"),
        (
            "a step of the policy with a bad one of the critic ends the count of bad ones in a row",
            "            if is_whole:\n                self.guard",
            "            if not stopped:\n                self.guard",
        ),
        (
            "the critic steps where the policy's gradient is not finite",
            "            is_bad = overflowed = has_tokens = False\n"
            "            for optimizer in self.optimizers_in_use():\n",
            "            overflowed = has_tokens = False\n            for optimizer in self.optimizers_in_use():\n"
            "                is_bad = False\n",
        ),
        (
            "the critic computes where the policy's gradient is not finite",
            "                if not (stopped or is_bad):\n                    self.phase",
            "                if not stopped:\n                    self.phase",
        ),
        (
            "the critic has its turn before the policy",
            "            for optimizer in self.optimizers_in_use():\n",
            "            for optimizer in reversed(self.optimizers_in_use()):\n",
        ),
        tests=("tests/faults/test_bad_numbers.py",),
    ),
    *in_file(
        "train/update.py",
        (
            "policy and critic have their gradients in one turn",
            "self.passes_of(optimizer)\n",
            "self.passes\n",
        ),
        tests=whole_step("defaults, own critic"),
    ),
    *in_file(
        "train/update.py",
        (
            "demonstrations are shown in the critic's turn too",
            " and any(POLICY in pass_.trains for pass_ in passes)",
            "",
        ),
        tests=whole_step("demonstrations, temperature, own critic"),
    ),
    *in_file(
        "train/update.py",
        ("an update is begun anew after steps were taken", "not alone or is_first:", "True:"),
        (
            "an update is begun anew where the critic of its first mini-batch does not fit",
            "is_first = number == 0 and optimizer is self.optimizers_in_use()[0]",
            "is_first = number == 0",
        ),
        (
            "a first mini-batch that does not fit is halved after it was scored whole",
            "not alone or is_first:",
            "not alone:",
        ),
        (
            "gradients of an attempt that did not fit are kept",
            "            self.drop_gradients()  # here",
            "            pass  # here",
        ),
        (
            "mini-batches after one that did not fit are whole again",
            "range(self.halvings - self.formed_with)",
            "range(0)",
        ),
        (
            "later updates do not know that micro-batches were halved",
            "            self.halvings += 1\n",
            "            pass\n",
        ),
        tests=(
            "tests/faults/test_memory.py::test_what_does_not_fit_is_halved_and_results_move_by_rounding_alone",
            "tests/faults/test_memory.py::test_a_first_mini_batch_that_does_not_fit_is_scored_anew_in_halves",
        ),
    ),
    *in_file(
        "train/memory.py",
        (
            "the dry step leaves the policy's gradients beside the critic's",
            "        update.drop_gradients()\n\n\ndef",
            "\n\ndef",
        ),
        (
            "the dry step tries the policy alone",
            "update.optimizers_in_use():",
            "update.optimizers_in_use()[:1]:",
        ),
        (
            "the dry step is one of the critic's warm-up",
            "first_step = config.value.warmup_steps",
            "first_step = 0",
        ),
        tests=("tests/faults/test_memory.py::test_gradients_of_policy_and_critic_are_never_there_together",),
    ),
    *in_file(
        "train/memory.py",
        ("the dry step has no room for gradients of earlier parts", "[item] * count", "[item]"),
        ("the dry step of halved micro-batches has room for one alone", "len(batches) > 1 or ", ""),
        tests=(
            "tests/faults/test_memory.py::test_the_dry_step_has_room_for_gradients_where_a_mini_batch_has_several_parts",
        ),
    ),
    *in_file(
        "train/checkpoint.py",
        (
            "a resumed run forgets the scale of its evaluations",
            'for name in ("score_moments", "eval_moments")',
            'for name in ("score_moments",)',
        ),
        tests=("tests/train/test_options.py::test_evaluations_of_running_moments_share_the_scale_of_the_first",),
    ),
    *in_file(
        "train/trainer.py",
        (
            "evaluations are normalized by the moments of training so far",
            "self.state.eval_moments if is_moving else self.state.score_moments",
            "self.state.score_moments",
        ),
        tests=("tests/train/test_options.py::test_evaluations_of_running_moments_share_the_scale_of_the_first",),
    ),
    *in_file(
        "models/merging.py",
        ("weights in half precision are merged", "kinds == {(torch.float32, \"cpu\")} and ", ""),
        ("a tied head is merged", " or users[id(base.weight)] > 1", ""),
        ("the base keeps the merged weights", "each.layer.get_base_layer().weight.data = each.of_base", "pass"),
        ("a layer stays merged", "each.layer.merged_adapters = []", "pass"),
        ("merged weights stay in memory", "finally:\n            self._merged = []", "finally:\n            pass"),
        ("the base's own tensor is changed", "of_base.clone()", "of_base"),
        ("no limit of merged weights", " and size <= MOST_BYTES", ""),
        ("a merge without the bias of an adapter", " or layer.lora_bias[adapter]", ""),
        tests=("tests/models/test_merging.py",),
    ),
    *in_file(
        "train/plan.py",
        (
            "a plan counts the gradients of policy and critic at once",
            "at_once = max(role.trainable for role in roles)",
            "at_once = sum(role.trainable for role in roles)",
        ),
        tests=("tests/train/test_plan.py::test_gradients_are_those_of_the_policy_or_of_its_critic",),
    ),
    *in_file(
        "train/update.py",
        ("the critic's warm-up trains the trunk", "self.engine.forget(self.roles", "list(self.roles"),
        (
            "the critic warms up one update too long",
            "= step < config.value.warmup_steps",
            "= step <= config.value.warmup_steps",
        ),
        tests=whole_step("warm-up of the critic, head"),
    ),
    *in_file(
        "train/update.py",
        ("the policy's schedule moves on while the critic warms up", "if optimizer.name in names", "if names"),
        tests=whole_step("warm-up of the critic, own critic"),
    ),
    *in_file(
        "train/update.py",
        ("the SFT loss has no coefficient", "scaled(self.config.ppo.ptx_coef * loss", "scaled(loss"),
        ("demonstrations are unlearned", "loss = -algo.masked_sum(out.logprobs", "loss = algo.masked_sum(out.logprobs"),
        (
            "demonstrations are read at the sampling temperature",
            "policy_pass(batch, temperature=1.0)",
            "policy_pass(batch, temperature=config.sampling.temperature)",
        ),
        (
            "the SFT loss is a sum of means over micro-batches",
            "batch.response_mask) / num_tokens",
            "batch.response_mask) / batch.num_response_tokens",
        ),
        tests=whole_step("demonstrations, temperature, head"),
    ),
    *in_file(
        "train/batches.py",
        ("every epoch of an update has the same order", '"shuffle", step, epoch)', '"shuffle", step, 0)'),
        ("every update has the same order", '"shuffle", step, epoch)', '"shuffle", 0, epoch)'),
        (
            "the order of mini-batches ignores the seed",
            'noise_key(config.train.seed, "shuffle"',
            'noise_key(0, "shuffle"',
        ),
        (
            "mini-batches are not shuffled",
            "torch.randperm(len(wholes), generator=torch.Generator().manual_seed(seed)).tolist()",
            "range(len(wholes))",
        ),
        ("the last mini-batch of an epoch is lost", "answers >= number * config", "answers > number * config"),
        (
            "a mini-batch holds those before it",
            "group, number = [], number + 1",
            "group, number = list(group), number + 1",
        ),
        tests=(f"{BOOKKEEPING}::test_epochs_updates_and_seeds_differ_in_their_order",),
    ),
)

LOGGED = (
    *in_file(
        "train/trainer.py",
        (
            "the logged KL coefficient is that of the start",
            "= self.state.kl_coef\n        return values",
            "= self.config.ppo.kl_coef\n        return values",
        ),
        tests=logged("k2, coefficient adapts"),
    ),
    *in_file(
        "train/update.py",
        (
            "the logged policy loss is a mean over padding",
            'losses["policy_loss"].detach(), mask)',
            'losses["policy_loss"].detach())',
        ),
        (
            "the logged value loss is a mean over padding",
            'losses["value_loss"].detach(), mask)',
            'losses["value_loss"].detach())',
        ),
        (
            "the share of clipped values is over padding",
            'metrics.mean("val/clipfrac_avg", clipped, mask)',
            'metrics.mean("val/clipfrac_avg", clipped)',
        ),
        (
            "the logged KL in the loss is a mean over padding",
            'losses["kl_loss"].detach(), mask)',
            'losses["kl_loss"].detach())',
        ),
        tests=logged("critic model", "KL k1 in the loss"),
    ),
)

EXPERIENCE = (
    *in_file(
        "train/experience.py",
        ("rewards are always whitened", "if ppo.whiten_rewards:", "if True:"),
        ("advantages are never whitened", "if ppo.whitens_advantages and", "if False and"),
        ("whitening shifts no mean", "advantages, loss_mask, keep_mean=False", "advantages, loss_mask, keep_mean=True"),
        (
            "returns come from whitened advantages",
            "return Targets(advantages, std, returns)",
            "return Targets(advantages, std, advantages + outputs.values)",
        ),
        (
            "rows are lost when micro-batches are joined",
            "whole[list(batch.rows), : part.shape[1]] = part",
            "whole[sorted(batch.rows), : part.shape[1]] = part",
        ),
        (
            "rows are lost when the batch is cut into micro-batches",
            "whole[list(batch.rows), : batch.response_mask",
            "whole[sorted(batch.rows), : batch.response_mask",
        ),
        (
            "advantages are whitened in each micro-batch",
            "advantages=of(learned.advantages, batch)",
            "advantages=algo.whiten(of(learned.advantages, batch), of(loss_mask, batch), keep_mean=False)",
        ),
        tests=whole_step("defaults, head"),
    ),
    *in_file(
        "train/experience.py",
        (
            "the KL is that from the reference",
            "algo.kl_estimate(self.logprobs, self.ref_logprobs",
            "algo.kl_estimate(self.ref_logprobs, self.logprobs",
        ),
        ("the estimator of the KL in the reward is always k1", "outputs.kl(ppo.kl_estimator)", 'outputs.kl("k1")'),
        ("γ and λ are swapped", "gamma=ppo.gamma, lam=lam)", "gamma=lam, lam=ppo.gamma)"),
        tests=whole_step("k3, temperature, gamma, lambda, head"),
    ),
    *in_file(
        "train/experience.py",
        ("whitened rewards lose their mean", "rewards, mask, keep_mean=True", "rewards, mask, keep_mean=False"),
        ("old values are the returns", "values=of(outputs.values, batch)", "values=of(learned.returns, batch)"),
        tests=whole_step("rewards whitened, tight clips, head"),
    ),
    *in_file(
        "train/experience.py",
        ("advantages are always whitened", "if ppo.whitens_advantages and", "if True and"),
        tests=whole_step("no whitening, no value clip, head"),
    ),
    *in_file(
        "train/experience.py",
        ("the KL is in the reward too where it is in the loss", 'kl_coef if ppo.kl_in == "reward" else 0.0', "kl_coef"),
        (
            "the KL in the loss is scaled by the variance of the advantages",
            "algo.whitening_scale(float(algo.masked_var(advantages, loss_mask)))",
            "float(algo.masked_var(advantages, loss_mask))",
        ),
        (
            "the KL in the loss does not shrink with whitened advantages",
            "kl_loss_coef / learned.advantage_std",
            "kl_loss_coef",
        ),
        tests=whole_step("KL k1 in the loss, head"),
    ),
    *in_file(
        "train/experience.py",
        (
            "advantages are clipped from above alone",
            "advantages.clamp(-ppo.advantage_clip, ppo.advantage_clip)",
            "advantages.clamp(max=ppo.advantage_clip)",
        ),
        ("the critic's λ is the policy's", "gamma=ppo.gamma, lam=value_lam)", "gamma=ppo.gamma, lam=lam)"),
        ("the policy's λ is the critic's", "        _, returns = algo.gae", "        advantages, returns = algo.gae"),
        tests=whole_step("lambda of the critic, advantages clipped, head"),
    ),
    *in_file(
        "train/experience.py",
        ("the length-adaptive λ is ignored", "ppo.lam if ppo.lam_alpha is None else", "ppo.lam if True else"),
        (
            "the length-adaptive λ is that of the longest answer",
            "algo.length_adaptive_lam(mask.sum(dim=1), ",
            "algo.length_adaptive_lam(mask.sum(dim=1) * 0 + mask.shape[1], ",
        ),
        (
            "the critic has the length-adaptive λ",
            "if ppo.value_lam is not None or ppo.lam_alpha is not None:",
            "if ppo.value_lam is not None:",
        ),
        tests=whole_step("length-adaptive lambda, head"),
    ),
    *in_file(
        "train/experience.py",
        (
            "advantages are whitened over tokens that take no part",
            "algo.whiten(advantages, loss_mask",
            "algo.whiten(advantages, mask",
        ),
        ("all tokens take part in the losses", "loss_mask=own_mask", "loss_mask=batch.response_mask"),
        tests=whole_step("frozen moments, fixed score, overlong, cut answers masked, head"),
    ),
    *in_file(
        "train/experience.py",
        ("RLOO is GRPO", "algo.rloo(rewards, mask", "algo.grpo(rewards, mask"),
        (
            "the rows of a batch are one prompt's",
            "algo.rloo(rewards, mask, num_generations=num_generations)",
            "algo.rloo(rewards, mask, num_generations=len(mask))",
        ),
        tests=whole_step("rloo, pairs"),
    ),
    *in_file(
        "train/experience.py",
        ("GRPO lacks the KL", "num_generations, penalties=-coef * kl)", "num_generations)"),
        ("GRPO normalises the KL with the score", "algo.grpo(judged, mask", "algo.grpo(judged - coef * kl, mask"),
        ("GRPO has the KL twice", "scores, kl, mask, kl_coef=0.0)", "scores, kl, mask, kl_coef=coef)"),
        tests=whole_step("grpo, KL in the reward"),
    ),
    *in_file(
        "train/experience.py",
        ("γ is 1 in the return to go", "mask, gamma=ppo.gamma)", "mask, gamma=1.0)"),
        tests=whole_step("reinforce_pp"),
    ),
)

MEASURE = in_file(
    "train/measure.py",
    ("the objective's penalty is a reward", "penalty = -kl_coef", "penalty = kl_coef"),
    (
        "the logged KL is a mean over tokens",
        'metrics.mean("objective/kl", algo.masked_sum(outputs.kl("k1"), mask, dim=1))',
        'metrics.mean("objective/kl", outputs.kl("k1"), mask)',
    ),
    ("the logged objective lacks the KL", "scores + penalty)", "scores)"),
    ("the logged entropy is negative", '"objective/entropy", -algo', '"objective/entropy", algo'),
    ("the logged entropy is a mean over padding", "outputs.entropy, mask)", "outputs.entropy)"),
    (
        "the logged values are a mean over padding",
        'outputs.values, outputs.mask)\n        metrics.var("val/returns',
        'outputs.values)\n        metrics.var("val/returns',
    ),
    (
        "the explained variance is over padding",
        "learned.returns - outputs.values, outputs.mask)",
        "learned.returns - outputs.values)",
    ),
    (
        "the residual of the critic adds the values",
        "learned.returns - outputs.values",
        "learned.returns + outputs.values",
    ),
    (
        "the explained variance is what is not explained",
        "1 - residual_var / returns_var if",
        "residual_var / returns_var if",
    ),
    (
        "the logged drift is a mean over padding",
        "algo.approx_kl(new_logprobs, old.logprobs), mask)",
        "algo.approx_kl(new_logprobs, old.logprobs))",
    ),
    (
        "the logged ratio is a mean over padding",
        'metrics.mean("val/ratio", ratio, mask)',
        'metrics.mean("val/ratio", ratio)',
    ),
    (
        "the ratio's variance is over padding",
        'metrics.var("val/ratio_var", ratio, mask)',
        'metrics.var("val/ratio_var", ratio)',
    ),
    ("the share of clipped tokens is over padding", "low | high, mask)", "low | high)"),
    ("the share of clipped tokens is that of one side", "low | high, mask)", "high, mask)"),
    (
        "the sides of the clip are swapped in the metrics",
        'metrics.mean("policy/clipfrac_low", low, mask)',
        'metrics.mean("policy/clipfrac_low", high, mask)',
    ),
    ("the first ratio's error is that of any mini-batch", "    if is_first:\n", "    if True:\n"),
    (
        "the spread of scores is their variance",
        'values.pop("objective/scores_var") ** 0.5',
        'values.pop("objective/scores_var")',
    ),
    (
        "the gap to the sampler cancels out",
        "(sampled - outputs.logprobs).abs(), told",
        "(sampled - outputs.logprobs).sum(dim=1, keepdim=True).abs().expand_as(mask), told",
    ),
    (
        "the length is that of the longest answer",
        'metrics.mean("rollout/length", lengths)',
        'metrics.mean("rollout/length", lengths.max())',
    ),
    tests=logged("critic model"),
)

ROLLOUT = (
    *in_file(
        "train/rollout.py",
        (
            "answers are kept in the order in which they finish",
            "completions[position] = completion",
            "completions[done - 1] = completion",
        ),
        tests=(f"{BOOKKEEPING}::test_the_judge_is_given_each_answer_with_its_own_prompt",),
    ),
    *in_file(
        "models/stop_strings.py",
        (
            "rewards see special tokens",
            "    skip_special_tokens: bool = True,\n",
            "    skip_special_tokens: bool = False,\n",
        ),
        tests=(f"{BOOKKEEPING}::test_the_judge_is_given_each_answer_with_its_own_prompt",),
    ),
    *in_file(
        "models/stop_strings.py",
        (
            "too little of an answer is read for a string that ends it",
            "if len(text) >= size or count",
            "if len(text) >= 1 or count",
        ),
        (
            "bytes that begin within a character hide a string that ends the answer",
            "for more in (1, 2, 3))",
            "for more in (0,))",
        ),
        ("special tokens hide a string that ends the answer", "readings.append(", "list("),
        ("a token is trusted to complete no string", "BROKEN in text or not self._last", "not self._last"),
        tests=("tests/models/test_stop_strings.py::test_an_answer_ends_where_the_text_of_its_prefixes_says",),
    ),
    *in_file(
        "models/stop_strings.py",
        ("a stop string stays in the text", "return count, whole[:start]", "return count, whole"),
        ("judges that read tokens read the stop string", "list(token_ids[:count])", "list(token_ids)"),
        ("judges get more tokens than they have room for", "            ids = whole\n", "            pass\n"),
        ("an answer that a string ended is not closed", "return ids + self._end", "return ids"),
        (
            "a stop token hides a string that it completes",
            "        if text != continued(token_ids, before, tokenizer):\n            return text\n",
            "        token_ids = token_ids[:-1]\n",
        ),
        ("judges read a stop token that is no special token", "token_ids = token_ids[:-1]", "pass"),
        tests=("tests/models/test_stop_strings.py",),
    ),
    *in_file(
        "train/rollout.py",
        (
            "every answer is judged with the first prompt's columns",
            "[p.columns.get(name) for p in prompts]",
            "[prompts[0].columns.get(name) for p in prompts]",
        ),
        (
            "the judge gets the answer's ids in place of the query's",
            "query_ids=[list(p.token_ids) for p in prompts]",
            "query_ids=ids",
        ),
        tests=(f"{BOOKKEEPING}::test_the_judge_is_given_each_answer_with_its_own_prompt",),
    ),
    *in_file(
        "train/rollout.py",
        (
            "an end token in the prompt ends the answer",
            '[completion.finish_reason == "stop" for completion in self.completions]',
            "[2 in (*p.token_ids, *c.token_ids) for p, c in zip(self.prompts, self.completions)]",
        ),
        ("answers that were cut count as ended", 'completion.finish_reason == "stop"', "len(completion.token_ids) > 0"),
        ("lengths lack the end token", "[len(completion.token_ids) for", "[len(completion.token_ids) - 1 for"),
        (
            "scores are normalised by those of the batch they are in",
            "algo.normalised_scores(scores, moments)",
            "algo.normalised_scores(scores, algo.merged_moments(algo.ScoreMoments(), scores))",
        ),
        ("scores are not normalised", "if ppo.score_norm is not None:", "if False:"),
        (
            "rewards are clipped from above alone",
            "scores.clamp(-ppo.reward_clip, ppo.reward_clip)",
            "scores.clamp(max=ppo.reward_clip)",
        ),
        (
            "the rule for answers that were cut falls on those that ended",
            "scores, answers.ended, penalty",
            "scores, ~answers.ended, penalty",
        ),
        (
            "overlong answers gain",
            "scores + ppo.overlong_penalty * penalties",
            "scores - ppo.overlong_penalty * penalties",
        ),
        ("the overlong penalty has no weight", "scores + ppo.overlong_penalty * penalties", "scores + penalties"),
        tests=whole_step("running moments, penalty, overlong, head"),
    ),
    *in_file(
        "train/rollout.py",
        (
            "the longest length is that of the batch",
            "max_length=longest, buffer",
            "max_length=int(lengths.max()), buffer",
        ),
        tests=(f"{BOOKKEEPING}::test_the_overlong_penalty_is_measured_by_the_longest_length_there_may_be",),
    ),
    *in_file(
        "train/batches.py",
        ("the token budget is ignored", "config.train.max_tokens_per_micro_batch,\n", "None,\n"),
        tests=(f"{BOOKKEEPING}::test_micro_batches_keep_to_the_token_budget",),
    ),
)

EVALUATE = (
    *in_file(
        "train/evaluate.py",
        (
            "evaluation has the noise of training's first answers",
            'config.train.seed, "eval", p.row, 0',
            'config.train.seed, "train", p.row, 0',
        ),
        ("all prompts of an evaluation have the same noise", '"eval", p.row, 0', '"eval", 0, 0'),
        tests=(f"{BOOKKEEPING}::test_evaluations_share_their_noise_with_each_other_and_with_nothing_else",),
    ),
    *in_file(
        "train/evaluate.py",
        (
            "the KL of an evaluation lacks the temperature",
            "response_outputs(policy, batch, temperature=temperature)",
            "response_outputs(policy, batch, temperature=1.0)",
        ),
        (
            "the KL of an evaluation is between one policy and itself",
            "roles.ref_logprobs(batch_of(rows), temperature)",
            "of_policy(rows)",
        ),
        (
            "the KL of an evaluation is a mean over padded tokens",
            "algo.masked_sum(gap, batch_of(rows).response_mask, dim=1).tolist()",
            "gap.mean(dim=1).tolist()",
        ),
        (
            "the spread of an evaluation's scores is their variance",
            'numbers.pop("eval_scores_var") ** 0.5',
            'numbers.pop("eval_scores_var")',
        ),
        (
            "an evaluation's scores have no rules applied",
            'metrics.mean("eval_scores", judged.scores)',
            'metrics.mean("eval_scores", sum(torch.tensor(x) for x in judged.components.values()))',
        ),
        tests=logged("critic model", "running scores"),
    ),
)

EMA = in_file(
    "train/ema.py",
    ("the decay of the average is that of the policy", "1 - self._decay)", "self._decay)"),
    ("the average is kept in the weights' own precision", "wide(part(p)).clone()", "part(p).clone()"),
    ("the average is the policy itself", "wide(part(p)).clone()", "wide(part(p))"),
    ("the average stays in the policy", "            self._fill(trained)\n", "            pass\n"),
    tests=("tests/train/test_ema.py",),
)

OPTIM = in_file(
    "train/optim.py",
    ("gradients are never cleared", "        self.optimizer.zero_grad(set_to_none=True)\n", ""),
    (
        "the schedule moves on twice a step",
        "            self.scheduler.step()\n",
        "            self.scheduler.step(), self.scheduler.step()\n",
    ),
    (
        "the schedule counts no epochs",
        "num_updates * config.ppo.num_ppo_epochs * config.ppo.num_mini_batches",
        "num_updates * config.ppo.num_mini_batches",
    ),
    (
        "the schedule counts no mini-batches",
        "num_updates * config.ppo.num_ppo_epochs * config.ppo.num_mini_batches",
        "num_updates * config.ppo.num_ppo_epochs",
    ),
    ("the warm-up is of updates", "round(train.warmup_ratio * total_steps)", "round(train.warmup_ratio)"),
    ("Adam's ε is torch's", '"eps": train.adam_epsilon', '"eps": 1e-8'),
    (
        "Adam's betas are swapped",
        '"betas": (train.adam_beta1, train.adam_beta2)',
        '"betas": (train.adam_beta2, train.adam_beta1)',
    ),
    ("the weight decay is torch's", '"weight_decay": train.weight_decay', '"weight_decay": 0.01'),
    (
        "every parameter is clipped alone",
        "float(nn.utils.clip_grad_norm_(self.parameters, limit))",
        "float(sum(nn.utils.clip_grad_norm_([p], limit) ** 2 for p in self.parameters) ** 0.5)",
    ),
    tests=("tests/train/test_optim.py",),
)

HEADS = in_file(
    "models/heads.py",
    ("a fresh critic says anything", "        nn.init.zeros_(self.weight)\n", ""),
    tests=("tests/models/test_roles_training.py::test_a_critic_model_from_the_policy_has_its_trunk_and_says_zero",),
)

SWITCHING = "tests/models/test_roles_switching.py"
ROLES = (
    *in_file(
        "models/build.py",
        (
            "the reference is the policy's adapter",
            '"the base, adapters off", OFF)',
            '"the base, adapters off", DEFAULT)',
        ),
        tests=(f"{SWITCHING}::test_reference_and_rewards_are_bitwise_unchanged_by_training",),
    ),
    *in_file(
        "models/roles.py",
        (
            "the policy trains the critic's adapter too",
            "[Pass(self, POLICY, (POLICY,)), Pass(self, VALUE, (VALUE,))]",
            "[Pass(self, POLICY, (POLICY, VALUE)), Pass(self, VALUE, (VALUE,))]",
        ),
        (
            "the reward is read by the policy's adapter",
            "with self.use(role.name) as model:",
            "with self.use(POLICY) as model:",
        ),
        tests=(f"{SWITCHING}::test_reference_and_rewards_are_bitwise_unchanged_by_training",),
    ),
    *in_file(
        "models/build.py",
        (
            "the reference shares the policy's weights",
            'frozen_copy(model, autocast_dtype), path, "frozen copy"',
            'model, path, "frozen copy"',
        ),
        tests=(f"{SWITCHING}::test_a_full_reference_is_a_copy_that_training_does_not_reach",),
    ),
    *in_file(
        "models/rounding.py",
        (
            "a head that is tied to the embeddings is rounded in a frozen copy",
            "if weight not in elsewhere]",
            "if weight in by_layers]",
        ),
        tests=("tests/models/test_rounding.py::test_linear_layers_alone_are_rounded_and_a_tied_head_is_not",),
    ),
    *in_file(
        "models/roles.py",
        (
            "a frozen copy keeps rounded weights that change its answers",
            "if torch.equal(*logits):",
            "if True:",
        ),
        tests=("tests/models/test_rounding.py::test_a_reference_that_rounded_weights_would_change_is_copied_anew",),
    ),
    *in_file(
        "models/build.py",
        (
            "a reference is kept and computes where there is no KL",
            "    if config.ppo.kl_coef > 0:\n        roles.append(Role(REFERENCE, frozen",
            "    if True:\n        roles.append(Role(REFERENCE, frozen",
        ),
        tests=(f"{SWITCHING}::test_without_kl_there_is_no_reference",),
    ),
    *in_file(
        "models/build.py",
        (
            "the reference of a continued adapter is the bare base",
            "if config.ppo.kl_coef > 0 and start is None:",
            "if config.ppo.kl_coef > 0:",
        ),
        tests=(f"{SWITCHING}::test_the_reference_of_a_loaded_start_is_not_the_bare_base",),
    ),
    *in_file(
        "models/roles.py",
        (
            "the adapter is not restored",
            "            self._switch(before)\n",
            "            before = self._adapted.active_adapter\n",
        ),
        (
            "the adapter is not restored after an exception",
            "        finally:\n            self._switch(before)\n",
            "        except Exception:\n            raise\n        else:\n            self._switch(before)\n",
        ),
        (
            "adapters that were off are on afterwards",
            "return OFF if self._adapters_off else self._adapted.active_adapter",
            "return self._adapted.active_adapter",
        ),
        tests=(
            f"{SWITCHING}::test_use_restores_everything_also_after_an_exception",
            f"{SWITCHING}::test_uses_nest",
        ),
    ),
    *in_file(
        "models/roles.py",
        ("dropout is on while a role computes", "self._set_modes([False] * len(modes))", "self._set_modes(modes)"),
        (
            "training modes are not restored",
            "            self._set_modes(modes)\n\n",
            "            self._set_modes([False] * len(modes))\n\n",
        ),
        tests=(f"{SWITCHING}::test_training_mode_from_before_comes_back",),
    ),
    *in_file(
        "models/roles.py",
        (
            "models rest in train mode",
            "with_quick_products(model).requires_grad_(False).eval()\n",
            "with_quick_products(model).requires_grad_(False)\n",
        ),
        ("the reference's weights ask for gradients", "(model).requires_grad_(False).eval()", "(model).eval()"),
        tests=(f"{HOLES}::test_at_rest_nothing_is_in_train_mode_and_only_what_trains_requires_gradients",),
    ),
    *in_file(
        "models/roles.py",
        (
            "the scoring pass lacks the temperature",
            "with pass_(batch, temperature=temperature, with_entropy=True)",
            "with pass_(batch, temperature=1.0, with_entropy=True)",
        ),
        (
            "the reference lacks the temperature",
            "lambda: response_outputs(model, batch, temperature=temperature)",
            "lambda: response_outputs(model, batch, temperature=1.0)",
        ),
        (
            "the policy is trained without the autocast that it is scored with",
            "            with self._roles.autocast():\n",
            "            with nullcontext() if torch.is_grad_enabled() else self._roles.autocast():\n",
        ),
        tests=(
            f"{BITWISE}[gpt2-full-fp32]",
            f"{BITWISE}[gpt2-full-autocast]",
        ),
    ),
    *in_file(
        "models/roles.py",
        (
            "the policy's adapter answers for the critic",
            "with self._roles.computing(self.name):",
            "with self._roles.computing(POLICY):",
        ),
        tests=("tests/models/test_roles_training.py::test_only_what_should_train_trains[llama-fresh-adapter]",),
    ),
    *in_file(
        "models/roles.py",
        ("the value loss always reaches the trunk", "detach_head=self._roles.detach_value", "detach_head=False"),
        tests=("tests/models/test_roles_training.py::test_the_value_loss_reaches_the_trunk_of_a_head_unless_detached",),
    ),
    *in_file(
        "models/roles.py",
        (
            "weights that are loaded are not taken over",
            "fill(parameter, state[name])\n",
            "fill(parameter, parameter.detach())\n",
        ),
        tests=("tests/models/test_roles_training.py::test_state_comes_back_bitwise",),
    ),
)

CHECKPOINT = in_file(
    "train/checkpoint.py",
    (
        "a resumed run forgets the KL coefficient",
        'RunState(**own | moments | {"source_moments": sources})',
        'RunState(**own | moments | {"source_moments": sources, "kl_coef": self.config.ppo.kl_coef})',
    ),
    (
        "a resumed run forgets its score moments",
        'for name in ("score_moments", "eval_moments")',
        'for name in ("eval_moments",)',
    ),
    (
        "a resumed run forgets Adam's moments",
        "            self.engine.load_optimizer_state(optimizer, states[optimizer.name])\n",
        "            pass\n",
    ),
    (
        "a resumed run forgets the moving average",
        "            self.average.load_state_dict(_tensors(path, AVERAGE), self.engine.cut)\n",
        "            pass\n",
    ),
    tests=(
        f"{BOOKKEEPING}::test_a_resumed_run_has_the_statistics_of_the_one_before"
        "[running moments, adaptive coefficient, average]",
    ),
)

REWARDS = in_file(
    "rewards/base.py",
    (
        "scores come back in the order of the batches",
        "scores[row] = score",
        "scores[[x == x for x in scores].count(True)] = score",
    ),
    (
        "a score that is no number is 0",
        "        if abs(number) <= LARGEST:\n            return number",
        "        if True:\n            return number if abs(number) <= LARGEST else 0.0",
    ),
    (
        "missing scores are 0",
        "    if len(values) != n:\n",
        "    values += [0.0] * (n - len(values))\n    if len(values) != n:\n",
    ),
    tests=("tests/rewards/test_checked.py",),
)

ENSEMBLES = in_file(
    "rewards/ensemble.py",
    ("what members disagree on is worth more", "fmean(scores) - coef", "fmean(scores) + coef"),
    ("members are docked by their standard deviation", "coef * pvariance(scores)", "coef * pvariance(scores) ** 0.5"),
    ("the worst case is the best", "            return min\n", "            return max\n"),
    tests=("tests/rewards/test_ensemble.py",),
)

REWARD_STAGE = in_file(
    "stages/reward.py",
    ("the better answer is the worse one", '"chosen_ids": [p.chosen_ids for', '"chosen_ids": [p.rejected_ids for'),
    tests=("tests/stages/test_reward_stage.py::test_the_first_loss_is_the_definition_on_the_start_model",),
)

DEFAULTS = in_file(
    "config/schema.py",
    (
        "γ is below 1 by default",
        "gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0",
        "gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 0.99",
    ),
    ("rewards are whitened by default", "whiten_rewards: bool = False", "whiten_rewards: bool = True"),
    ("answers are sampled colder by default", "temperature: PositiveFloat = 1.0", "temperature: PositiveFloat = 0.7"),
    (
        "the KL is in the loss by default",
        'kl_in: Literal["reward", "loss"] = "reward"',
        'kl_in: Literal["reward", "loss"] = "loss"',
    ),
    ("k3 is in the reward by default", 'Literal["k1", "k2", "k3"] = "k1"', 'Literal["k1", "k2", "k3"] = "k3"'),
    ("Adam's ε is torch's by default", "adam_epsilon: PositiveFloat = 1e-5", "adam_epsilon: PositiveFloat = 1e-8"),
    ("long answers weigh less by default", '= "token_mean"', '= "sequence_mean"'),
    ("λ is 1 by default", "lam: Fraction = 0.95", "lam: Fraction = 1.0"),
    ("nothing holds the policy by default", "kl_coef: NonNegativeFloat = 0.05", "kl_coef: NonNegativeFloat = 0.0"),
    ("chance is rewarded by default", "entropy_coef: NonNegativeFloat = 0.0", "entropy_coef: NonNegativeFloat = 0.01"),
    (
        "values are not clipped by default",
        "cliprange_value: PositiveFloat | None = 0.2",
        "cliprange_value: PositiveFloat | None = None",
    ),
    ("the learning rate stays as it is by default", '    ] = "linear"\n', '    ] = "constant"\n'),
    tests=("tests/config/test_defaults.py",),
)

FP16 = "tests/train/test_fp16.py"
FLOAT16 = (
    *in_file(
        "train/optim.py",
        ("float16: gradients stay scaled", "gradient.div_(self.loss_scale.scale)", "pass"),
        (
            "float16: losses are not scaled",
            "return loss if self.loss_scale is None else loss * self.loss_scale.scale",
            "return loss",
        ),
        ("float16: the scale falls below 1", "max(self.scale / 2, 1.0)", "self.scale / 2"),
        (
            "float16: an overflow does not end the count of steps",
            "max(self.scale / 2, 1.0), 0",
            "max(self.scale / 2, 1.0), self.num_steps",
        ),
        ("float16: the scale grows once and then at once", "2 * self.scale, 0", "2 * self.scale, self.num_steps - 1"),
        ("float16: what is not finite is an overflow at every scale", "return self.scale > 1", "return True"),
        ("float16: nothing is an overflow", "return self.scale > 1", "return False"),
        tests=(FP16,),
    ),
    *in_file(
        "train/optim.py",
        (
            "float16: a resumed run scales its losses as a new one",
            'self.loss_scale = LossScale(**state["loss_scale"])',
            "self.loss_scale = LossScale()",
        ),
        tests=("tests/train/test_run.py::test_resumed_run_is_bitwise_the_run_that_was_not_interrupted",),
    ),
    *in_file(
        "train/update.py",
        (
            "float16: the loss of demonstrations is not scaled",
            "optimizer.scaled(self.config.ppo.ptx_coef * loss)",
            "self.config.ppo.ptx_coef * loss",
        ),
        ("float16: gradients are not divided by the scale", "        optimizer.unscale()\n", ""),
        ("float16: the scale stays after an overflow", "            scale.overflowed()\n", "            pass\n"),
        ("float16: the scale never grows", "            scale.took_step()\n", "            pass\n"),
        (
            "float16: an overflow of the policy keeps the critic from stepping",
            "overflowed |= gradients is Gradients.OVERFLOWED",
            "is_bad |= gradients is Gradients.OVERFLOWED",
        ),
        (
            "float16: a step with an overflow is counted",
            "is_whole = has_tokens and not (stopped or is_bad or overflowed)",
            "is_whole = has_tokens and not (stopped or is_bad)",
        ),
        (
            "float16: a step with an overflow is taken",
            "if gradients is Gradients.FIT:\n                    with self.changing",
            "if gradients in (Gradients.FIT, Gradients.OVERFLOWED):\n                    with self.changing",
        ),
        (
            "float16: a dry step lets the scale fall",
            "            return Gradients.OVERFLOWED\n",
            "            optimizer.loss_scale.overflowed()\n            return Gradients.OVERFLOWED\n",
        ),
        tests=(FP16,),
    ),
    *in_file(
        "models/roles.py",
        (
            "float16: forwards run in bfloat16",
            "torch.autocast(self.device.type, self.autocast_dtype)",
            "torch.autocast(self.device.type, torch.bfloat16)",
        ),
        tests=(FP16,),
    ),
    *in_file(
        "models/build.py",
        (
            "float16: the frozen base is float32",
            "config.model.quantization, autocast_dtype or torch.float32",
            "config.model.quantization, torch.float32",
        ),
        tests=(FP16,),
    ),
    *in_file(
        "models/device.py",
        (
            "float16: a GPU that emulates bfloat16 counts as one that has it",
            "is_bf16_supported(including_emulation=False)",
            "is_bf16_supported()",
        ),
        tests=("tests/models/test_loading.py::test_bf16_on_a_gpu_that_emulates_it_is_none",),
    ),
    *in_file(
        "train/run.py",
        (
            "float16: an engine is not asked about the launcher's",
            "engine.check(resolved(config))",
            "engine.check(config)",
        ),
        tests=("tests/distributed/test_launchers.py::test_an_engine_is_asked_about_what_the_launcher_says_too",),
    ),
    *in_file(
        "stages/start.py",
        ("float16: copies of whole modules train in it", "parameter.data = parameter.data.float()", "pass"),
        tests=(
            "tests/stages/test_reward_stage.py::test_fp16_freezes_a_base_in_float16_beside_a_float32_head_and_adapter",
        ),
    ),
    *in_file(
        "train/plan.py",
        ("float16: the cache is planned wider", "if config.train.bf16 or config.train.fp16", "if config.train.bf16"),
        tests=("tests/train/test_plan.py::test_a_frozen_base_is_counted_in_the_type_of_autocast",),
    ),
    *in_file(
        "compat/trl/optimizers.py",
        ("float16: losses of the user's optimizer are not scaled", "loss_scale(config.train)", "None"),
        tests=("tests/compat/test_trl_trainer.py::test_losses_of_the_users_optimizer_are_scaled_in_float16",),
    ),
)

ROWS = (
    *in_file(
        "data/bad_rows.py",
        ("bad rows are left out unasked", "            if errors and not drops:\n                break\n", ""),
        ("rows behind a bad one get other numbers", "read(rows, own, left)", "read(rows, own, range(len(left)))"),
        tests=(
            "tests/data/test_bad_rows.py::test_all_of_them_are_named_at_once_in_the_order_of_the_file",
            "tests/data/test_bad_rows.py::test_they_are_left_out_and_counted_and_the_others_keep_their_numbers",
        ),
    ),
    *in_file(
        "data/forms.py",
        ("what follows messages in JSON is lost", "end == len(text) and any(map(", "any(map("),
        tests=("tests/data/test_forms.py::test_text_that_is_no_conversation_stays_text",),
    ),
    *in_file(
        "data/rendering.py",
        ("templates print today's date in a resumed run", "template = _stopped_clock(now) + template", "pass"),
        tests=("tests/data/test_rendering.py::test_a_template_that_prints_the_present_date_prints_the_given_one",),
    ),
)

ANSWERS = (
    *in_file(
        "models/stop_strings.py",
        ("an answer is read as a text of its own", "if not before:\n        return", "if True:\n        return"),
        (
            "an answer that pulls a blank back loses its beginning",
            "whole[next((i for i in range(shared) if text[i] != whole[i]), shared) :]",
            "whole[len(text) :]",
        ),
        tests=(
            "tests/models/test_answer_texts.py::test_a_query_and_its_answer_are_the_text_of_both",
            "tests/models/test_answer_texts.py"
            "::test_a_blank_before_special_tokens_that_the_answer_pulls_back_takes_nothing_from_it",
        ),
    ),
    *in_file(
        "models/fit.py",
        ("tokens that a judge has no embedding for are passed over", "token < rows or token in known", "token < rows"),
        tests=("tests/train/test_vocabularies.py::test_only_ids_without_a_token_and_without_a_row_are_passed_over",),
    ),
    *in_file(
        "rewards/reading.py",
        (
            "an answer that a judge cannot read is scored as another text",
            "None if each is None else score for score",
            "score for score",
        ),
        tests=(
            "tests/rewards/test_model_options.py"
            "::test_an_answer_that_a_judge_cannot_read_is_an_error_unless_it_has_a_score",
        ),
    ),
    *in_file(
        "rewards/files/__init__.py",
        ("a reward file that changed does not run again", "if _run.get(name) != source:", "if name not in _run:"),
        (
            "a reward file runs as it was compiled before",
            "self.source_to_code(self.get_data(path), path)",
            "super().get_code(fullname)",
        ),
        tests=("tests/rewards/test_files.py::test_a_file_that_changed_within_a_second_and_is_as_long_runs_again",),
    ),
    *in_file(
        "rewards/undisturbed.py",
        ("training goes on in the default dtype of reward code", ", torch.set_default_dtype)", ", lambda dtype: None)"),
        (
            "what a reward call sets ends with another call",
            "        _state.depth -= 1\n        if _state.depth == 0:",
            "        _state.depth -= 1\n        if True:",
        ),
        tests=(
            "tests/rewards/test_undisturbed.py::test_what_a_call_sets_holds_until_its_own_end",
            "tests/rewards/test_undisturbed.py::test_what_reward_code_changes_is_set_back_and_told_once",
        ),
    ),
    *in_file(
        "train/evaluate.py",
        ("an interrupted evaluation loses its scores", "samples[:] = [judged.sample(", "samples = [judged.sample("),
        tests=(
            "tests/inference/test_evaluate.py::test_answers_and_scores_are_kept_when_what_comes_after_is_interrupted",
        ),
    ),
)

RUNS = (
    *in_file(
        "config/places.py",
        (
            "a resumed run takes another model for its own that has moved",
            "any(n in saved and saved[n] == now.get(n) for n in names)",
            "True",
        ),
        tests=("tests/train/test_same_run.py::test_what_lies_elsewhere_must_be_the_same",),
    ),
    *in_file(
        "config/schema.py",
        ("micro-batches are those of one process", "if mini % min(rows * num_processes, mini) == 0)", ")"),
        tests=("tests/config/test_defaults.py::test_micro_batches_are_as_large_as_fits_up_to_eight",),
    ),
    *in_file(
        "train/optim.py",
        ("warm-up in updates is in optimizer steps", "_total_steps(config, train.warmup_steps)", "train.warmup_steps"),
        tests=("tests/train/test_optim.py::test_warm_up_is_over_as_many_updates_as_were_said",),
    ),
    *in_file(
        "stages/training.py",
        (
            "a stage keeps its last model for its best",
            "run.engine.load(model, Path(state.best_model_checkpoint))",
            "pass",
        ),
        tests=("tests/stages/test_best.py::test_the_best_evaluated_model_is_kept_and_told[full]",),
    ),
    *in_file(
        "stages/watch.py",
        (
            "a stage does not save its best model",
            "            control.should_save = True\n        elif",
            "            pass\n        elif",
        ),
        tests=("tests/stages/test_best.py::test_the_best_evaluated_model_is_kept_and_told[full]",),
    ),
    *in_file(
        "stages/watch.py",
        (
            "patience is counted from the start of a stage",
            'row["step"] > (state.best_global_step or 0)',
            'row["step"] > 0',
        ),
        tests=("tests/stages/test_best.py::test_a_run_that_does_not_improve_ends_early_also_if_it_was_resumed",),
    ),
    *in_file(
        "stages/watch.py",
        (
            "a resumed stage has the experts of the start",
            "self.run.dist.each(lambda: load_weights(model, checkpoint))",
            "pass",
        ),
        tests=(
            "tests/stages/test_sft.py"
            "::test_a_model_whose_names_in_files_are_not_those_in_memory_goes_on_with_its_own_weights",
        ),
    ),
)

ATTENTION = "tests/models/test_attention.py"
ATTENDING = (
    *in_file(
        "models/attention.py",
        ("the gradient of attention has no mask", "(*wide, mask, **ctx.options)", "(*wide, None, **ctx.options)"),
        ("attention has no dropout", "is_plain = dropout_p == 0.0 and (", "is_plain = ("),
        ("the gradient of attention is in half precision", "x.detach().float()", "x.detach()"),
        tests=(
            f"{ATTENTION}::test_output_is_torchs_own_and_gradients_are_those_of_float32_rounded_once",
            f"{ATTENTION}::test_everything_else_is_left_to_torch",
        ),
    ),
    *in_file(
        "models/forward.py",
        ("the trunk's attention has the slow gradient", ", wide_gradients(backbone):", ":"),
        ("attention of a model's own forward has the slow gradient", ", wide_gradients(model.base_model), _", ", _"),
        tests=(f"{ATTENTION}::test_passes_that_train_have_their_gradients_that_way",),
    ),
)

DEFECTS = (
    *ADVANTAGES, *KL, *LOGPROBS, *LOSSES, *MASKING, *REDUCTION, *SCORES, *FORWARD, *COLLATE, *STREAM, *KEYS, *COLUMNS,
    *REDUCE, *GENERATION, *DRAFT, *DECODING, *TRAINER, *UPDATE, *LOGGED, *EXPERIENCE, *MEASURE, *ROLLOUT, *EVALUATE,
    *EMA, *OPTIM, *HEADS, *ROLES, *CHECKPOINT, *REWARDS, *ENSEMBLES, *REWARD_STAGE, *DEFAULTS, *FLOAT16, *ROWS,
    *ANSWERS, *RUNS, *ATTENDING,
)  # fmt: skip
