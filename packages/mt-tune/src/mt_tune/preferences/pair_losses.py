"""Losses of a chosen and a rejected answer, from the log-probabilities of the policy and of a reference.

Each takes `Pairs` and gives the loss of each pair. Names are those of TRL's DPOTrainer (`loss_type`); `cdpo`, `orpo`,
`simpo` and `cpo` have papers of their own. r is the log-ratio of policy to reference, summed over an answer:

    sigmoid       -log s(b d), d = r_chosen - r_rejected; with label smoothing e: cDPO,
                  -(1 - e) log s(b d) - e log s(-b d)                       (Rafailov 2023, Mitchell 2023)
    robust        the same over 1 - 2 e, with - e                           (Chowdhury 2024)
    hinge         max(0, 1 - b d)                                           (Zhao 2023)
    ipo           (r_c / |y_c| - r_r / |y_r| - 1 / (2 b))^2                 (Azar 2023; means over tokens, as TRL)
    exo_pair      the reverse KL of the pair's distribution                 (Ji 2024)
    nca_pair      noise contrastive                                         (Chen 2024)
    bco_pair      -log s(b r_c) - log s(-b r_r)                             (Jung 2024)
    sppo_hard     (r_c - 1 / (2 b))^2 + (r_r + 1 / (2 b))^2                 (Wu 2024)
    apo_zero, apo_down                                                      (D'Oosterlinck 2024)
    discopop      log-ratio modulated                                       (Lu 2024)
    aot           sigmoid of the k-th smallest policy margin and the k-th smallest reference margin of the batch
    aot_unpaired  the same of r_chosen and r_rejected                       (Melnyk 2024)
    sft           negative log-likelihood of the chosen answer, mean over its tokens
    orpo          odds ratio of the means, and the likelihood               (Hong 2024)
    simpo         margin of the means, without a reference                  (Meng 2024)
    cpo           contrastive without a reference, and the likelihood       (Xu 2024)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """All of one shape. chosen, rejected: log-probabilities of the answers by the policy, sums over their tokens;
    *_tokens: the numbers of tokens; reference_*: the same sums by the reference, 0 without one.

    matched: of losses that sort over the global batch, what each chosen and each rejected answer is compared with:
    "aot": the reference's margin of the same rank (of the chosen ones; those of the rejected ones are not read);
    "aot_unpaired": the rejected log-ratio of the chosen one's rank, and the chosen log-ratio of the rejected one's.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    matched: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def chosen_ratio(self) -> Tensor:
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        return self.rejected - self.reference_rejected

    @property
    def margin(self) -> Tensor:
        return self.chosen_ratio - self.rejected_ratio

    @property
    def mean_chosen(self) -> Tensor:
        return self.chosen / self.chosen_tokens

    @property
    def mean_rejected(self) -> Tensor:
        return self.rejected / self.rejected_tokens


@dataclass(frozen=True)
class PairOptions:
    """beta: inverse temperature. label_smoothing: probability that a preference is the wrong way round. gamma: SimPO's
    margin. nll_weight: weight of the chosen answer's likelihood in ORPO (as 1 there) and CPO."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5
    nll_weight: float = 1.0


PairLoss = Callable[[Pairs, PairOptions], Tensor]


def sigmoid(pairs: Pairs, options: PairOptions) -> Tensor:
    return _smoothed(options.beta * pairs.margin, options.label_smoothing)


def robust(pairs: Pairs, options: PairOptions) -> Tensor:
    scaled, wrong = options.beta * pairs.margin, options.label_smoothing
    return (-(1.0 - wrong) * F.logsigmoid(scaled) + wrong * F.logsigmoid(-scaled)) / (1.0 - 2.0 * wrong)


def sigmoid_norm(pairs: Pairs, options: PairOptions) -> Tensor:
    margin = pairs.chosen_ratio / pairs.chosen_tokens - pairs.rejected_ratio / pairs.rejected_tokens
    return -F.logsigmoid(options.beta * margin)


def hinge(pairs: Pairs, options: PairOptions) -> Tensor:
    return torch.relu(1.0 - options.beta * pairs.margin)


def ipo(pairs: Pairs, options: PairOptions) -> Tensor:
    margin = pairs.chosen_ratio / pairs.chosen_tokens - pairs.rejected_ratio / pairs.rejected_tokens
    return (margin - 1.0 / (2.0 * options.beta)) ** 2


def exo_pair(pairs: Pairs, options: PairOptions) -> Tensor:
    wrong, scaled = options.label_smoothing, options.beta * pairs.margin
    log_right, log_wrong = F.logsigmoid(scaled), F.logsigmoid(-scaled)
    return log_right.exp() * (log_right - math.log(1.0 - wrong)) + log_wrong.exp() * (log_wrong - math.log(wrong))


def nca_pair(pairs: Pairs, options: PairOptions) -> Tensor:
    chosen, rejected = options.beta * pairs.chosen_ratio, options.beta * pairs.rejected_ratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(pairs: Pairs, options: PairOptions) -> Tensor:
    return -F.logsigmoid(options.beta * pairs.chosen_ratio) - F.logsigmoid(-options.beta * pairs.rejected_ratio)


def sppo_hard(pairs: Pairs, options: PairOptions) -> Tensor:
    half = 1.0 / (2.0 * options.beta)
    return (pairs.chosen_ratio - half) ** 2 + (pairs.rejected_ratio + half) ** 2


def apo_zero(pairs: Pairs, options: PairOptions) -> Tensor:
    chosen, rejected = options.beta * pairs.chosen_ratio, options.beta * pairs.rejected_ratio
    return 1.0 - torch.sigmoid(chosen) + torch.sigmoid(rejected)


def apo_down(pairs: Pairs, options: PairOptions) -> Tensor:
    return torch.sigmoid(options.beta * pairs.chosen_ratio) + 1.0 - torch.sigmoid(options.beta * pairs.margin)


DISCOPOP_TAU = 0.05


def discopop(pairs: Pairs, options: PairOptions) -> Tensor:
    scaled = options.beta * pairs.margin
    modulation = torch.sigmoid(scaled / DISCOPOP_TAU)
    return -F.logsigmoid(scaled) * (1.0 - modulation) + torch.exp(-scaled) * modulation


def aot(pairs: Pairs, options: PairOptions) -> Tensor:
    margin = (pairs.chosen - pairs.rejected) - pairs.matched["aot"][0]
    return _smoothed(options.beta * margin, options.label_smoothing)


def aot_unpaired(pairs: Pairs, options: PairOptions) -> Tensor:
    rejected_of_rank, chosen_of_rank = pairs.matched["aot_unpaired"]
    of_chosen = _smoothed(options.beta * (pairs.chosen_ratio - rejected_of_rank), options.label_smoothing)
    of_rejected = _smoothed(options.beta * (chosen_of_rank - pairs.rejected_ratio), options.label_smoothing)
    # Both are the same terms in another order: the second adds its gradient alone.
    return of_chosen + of_rejected - of_rejected.detach()


def sft(pairs: Pairs, options: PairOptions) -> Tensor:
    return -pairs.mean_chosen


def orpo(pairs: Pairs, options: PairOptions) -> Tensor:
    odds = pairs.mean_chosen - pairs.mean_rejected - (_log1mexp(pairs.mean_chosen) - _log1mexp(pairs.mean_rejected))
    return -pairs.mean_chosen - options.beta * F.logsigmoid(odds)


def simpo(pairs: Pairs, options: PairOptions) -> Tensor:
    scaled = options.beta * (pairs.mean_chosen - pairs.mean_rejected) - options.gamma
    return _smoothed(scaled, options.label_smoothing)


def cpo(pairs: Pairs, options: PairOptions) -> Tensor:
    preference = _smoothed(options.beta * (pairs.chosen - pairs.rejected), options.label_smoothing)
    return preference - options.nll_weight * pairs.mean_chosen


def _smoothed(scaled: Tensor, wrong: float) -> Tensor:
    return -(1.0 - wrong) * F.logsigmoid(scaled) - wrong * F.logsigmoid(-scaled)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0."""
    return torch.log1p(-x.exp())


PAIR_LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": sigmoid,
    "robust": robust,
    "sigmoid_norm": sigmoid_norm,
    "hinge": hinge,
    "ipo": ipo,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "sft": sft,
    "orpo": orpo,
    "simpo": simpo,
    "cpo": cpo,
}
WITHOUT_REFERENCE = frozenset({"sft", "orpo", "simpo", "cpo"})
WITH_SMOOTHING = frozenset({"sigmoid", "robust", "exo_pair", "simpo", "cpo", "aot", "aot_unpaired"})
"""Losses in which label_smoothing has a meaning."""
