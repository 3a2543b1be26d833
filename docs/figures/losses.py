"""Draws the figures of docs/losses.md from the project's own loss functions: python docs/figures/losses.py"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from understudy.losses.divergences import DivergenceParameters, divergence
from understudy.losses.estimators import ESTIMATORS
from understudy.losses.tails import compared_outcomes

HERE = Path(__file__).parent
TEACHER, STUDENT, FAINT = "#4878a8", "#c44e52", "#999999"

PANELS = [
    ("forward_kl", "forward KL", DivergenceParameters()),
    ("jsd", "JSD β = 0.1", DivergenceParameters(beta=0.1)),
    ("jsd", "JSD β = 0.5", DivergenceParameters(beta=0.5)),
    ("jsd", "JSD β = 0.9", DivergenceParameters(beta=0.9)),
    ("skew_forward_kl", "skew forward KL α = 0.1", DivergenceParameters(alpha=0.1)),
    ("mixture", "½ forward + ½ reverse KL", DivergenceParameters(mixture_weight=0.5)),
    ("skew_reverse_kl", "skew reverse KL α = 0.1", DivergenceParameters(alpha=0.1)),
    ("tvd", "total variation", DivergenceParameters()),
    ("reverse_kl", "reverse KL", DivergenceParameters()),
]


def bell(x: Tensor, mean: Tensor | float, deviation: Tensor | float) -> Tensor:
    """Log-probabilities of a discretised Gaussian on the grid x."""
    return torch.log_softmax(-0.5 * ((x - mean) / deviation) ** 2, -1)


def fit(objective: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The one-mode student that minimises the objective, best of several starts."""
    best_value, best = float("inf"), None
    for start_mean, start_deviation in ((-2.0, 0.5), (2.2, 0.7), (0.0, 2.0), (0.3, 1.0)):
        mean = torch.tensor(start_mean, dtype=torch.float64, requires_grad=True)
        log_deviation = torch.tensor(start_deviation, dtype=torch.float64).log().requires_grad_()
        optimizer = torch.optim.Adam([mean, log_deviation], lr=0.02)
        for _ in range(1500):
            optimizer.zero_grad()
            value = objective(bell(x, mean, log_deviation.exp()))
            value.backward()
            optimizer.step()
        if value.item() < best_value:
            best_value, best = value.item(), bell(x, mean, log_deviation.exp()).detach()
    assert best is not None
    return best


def draw_two_modes() -> None:
    """A student with one mode, a teacher with two: what each divergence settles on."""
    x = torch.linspace(-6, 6, 161, dtype=torch.float64)
    teacher = torch.log(0.6 * bell(x, -2.0, 0.5).exp() + 0.4 * bell(x, 2.2, 0.7).exp())
    figure, axes = plt.subplots(3, 3, figsize=(9, 6), sharex=True, sharey=True)
    for axis, (kind, title, parameters) in zip(axes.flat, PANELS, strict=True):
        student = fit(lambda log_q, k=kind, ps=parameters: divergence(k, teacher, log_q, ps), x)
        axis.fill_between(x, teacher.exp(), color=TEACHER, alpha=0.35, linewidth=0, label="teacher")
        axis.plot(x, student.exp(), color=STUDENT, label="student")
        axis.set_title(title, fontsize=10)
        axis.set_yticks([])
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[0, 0].legend(frameon=False, fontsize=8)
    save(figure, "losses-two-modes")


def draw_tails() -> None:
    """Forward KL on K ids as the student's mass on them grows; within the K ids it agrees with the teacher."""
    teacher = torch.log(torch.tensor([[0.4, 0.2]], dtype=torch.float64))
    mass = torch.linspace(0.05, 0.999, 300, dtype=torch.float64)
    student = torch.log(mass[:, None] * torch.tensor([[2 / 3, 1 / 3]], dtype=torch.float64))
    figure, axis = plt.subplots(figsize=(6, 3.4))
    for tail, color in (("bucket", STUDENT), ("renormalise", FAINT), ("drop", TEACHER)):
        log_p, log_q = compared_outcomes(teacher.expand_as(student), student, torch.log1p(-mass), tail)
        value = divergence("forward_kl", log_p, log_q, DivergenceParameters())
        axis.plot(mass, value, color=color, label=f'tail = "{tail}"')
    axis.axvline(0.6, color="black", linewidth=0.6, linestyle=":")
    axis.axhline(0, color="black", linewidth=0.6)
    axis.annotate("teacher's mass on the K ids", (0.6, 1.25), xytext=(0.61, 1.25), fontsize=8)
    axis.set(xlabel="student's mass on the K ids", ylabel="loss", ylim=(-0.4, 1.4))
    axis.legend(frameon=False, fontsize=8, loc="lower left")
    save(figure, "losses-tails")


def draw_estimators() -> None:
    """Value and gradient factor (∂/∂log q) of each single-sample estimator."""
    r = torch.linspace(-2.5, 2.5, 300, dtype=torch.float64)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for index, (kind, function) in enumerate(ESTIMATORS.items()):
        leaf = r.clone().requires_grad_()
        value = function(leaf)
        value.sum().backward()
        style = {"color": f"C{index}", "label": kind, "linestyle": "--" if kind.endswith("+") else "-"}
        left.plot(r, value.detach(), **style)
        right.plot(r, leaf.grad, **style)
    left.set(title="value", xlabel="r = log q(y) − log p(y)", ylim=(-2.5, 5))
    right.set(title="gradient factor: what multiplies ∇log q(y)", xlabel="r", ylim=(-5, 3))
    left.legend(frameon=False, fontsize=8)
    save(figure, "losses-estimators")


def save(figure: plt.Figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "understudy"
    mpl.rcParams["svg.fonttype"] = "none"
    draw_two_modes()
    draw_tails()
    draw_estimators()
