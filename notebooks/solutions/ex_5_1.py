"""A dynamic loss scaler.

Multiply the loss, so that gradients in fp16 keep clear of zero; divide the factor out again before
the optimizer sees them. If one of them overflowed, leave the step out and halve the factor; after
`interval` good steps in a row, double it. So the scale finds its own level, and follows it.
Source: Micikevicius et al. 1710.03740, section 3.2.
"""

import torch
from torch import nn

from minipar.lab.exercises import Case, CheckFailed, fails

LEVEL, MINUTES = "medium", 25
GOOD = "the scale and the weights of torch.amp.GradScaler after every step, overflows included"
PRAISE = "This is all that fp16 training needs besides master weights."
SIZES = (1,)

STEPS, WIDTH = 30, 6


def given(size, random):
    """Start, inputs and factors of each step, a first scale that is too large, an interval."""
    start = torch.randn(WIDTH, generator=random)
    x = torch.randn(STEPS, WIDTH, generator=random)
    factors = 1e-7 * (1 + torch.rand(STEPS, generator=random))  # gradients around 1e-7
    first = int(torch.randint(9, 13, (), generator=random))
    factors[[first, first + 8]] = 1e6  # overflows at any scale that helps
    # And again after one good step: good steps are counted anew after an overflow.
    factors[first + 2], factors[first + 10] = float("inf"), float("nan")
    scale = 2.0 ** int(torch.randint(41, 44, (), generator=random))
    interval = int(torch.randint(2, 4, (), generator=random))
    return [(start, x, factors, scale, interval)] * size


def run(answer, axis, start, x, factors, scale, interval):
    weight = nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([weight], lr=1e6, momentum=0.9)
    seen = []

    def loss_of(step):
        def loss():
            # The product is in fp16, and so is its gradient on the way back.
            seen.append(weight.detach().double().clone())
            return (weight.half() * x[step].half()).float().sum() * factors[step]

        return loss

    used = answer(weight, optimizer, [loss_of(step) for step in range(STEPS)], scale, interval)
    return used, [*seen, weight.detach().double()]


def _truth(case: Case):
    start, x, factors, scale, interval = case.given[0]
    weight = nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([weight], lr=1e6, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    scales, weights = [], []
    for step in range(STEPS):
        weights.append(weight.detach().double().clone())
        optimizer.zero_grad()
        loss = (weight.half() * x[step].half()).float().sum() * factors[step]
        scaler.scale(loss).backward()
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    return scales, [*weights, weight.detach().double()]


def check_scales(case: Case) -> None:
    used, truth = case.results[0][0], _truth(case)[0]
    if not isinstance(used, list) or len(used) != STEPS:
        raise CheckFailed(f"expected a list of {STEPS} scales, one per step, got {used!r}")
    for step, (got, want) in enumerate(zip(used, truth, strict=True)):
        if float(got) != want:
            before = [f"{float(one):g}" for one in used[max(0, step - 4) : step]]
            raise CheckFailed(
                f"step {step} used a scale of {float(got):g}, expected {want:g}; "
                f"the scales before it were {', '.join(before) or 'none'}"
            )


def check_weights(case: Case) -> None:
    weights, truth = case.results[0][1], _truth(case)[1]
    if len(weights) != len(truth):
        raise CheckFailed(f"{len(weights) - 1} losses were computed; there are {STEPS} steps")
    for step, (got, want) in enumerate(zip(weights, truth, strict=True)):
        if not torch.allclose(got, want, rtol=1e-6):
            raise CheckFailed(
                f"the weights before step {step} differ:\n    expected {want.tolist()}\n"
                f"    got      {got.tolist()}"
            )


def solution(weight, optimizer, losses, scale, interval):
    used, good = [], 0
    for loss in losses:
        optimizer.zero_grad()
        (loss() * scale).backward()
        used.append(scale)
        weight.grad /= scale
        if weight.grad.isfinite().all():
            optimizer.step()
            good += 1
            if good == interval:
                scale, good = scale * 2, 0
        else:
            scale, good = scale / 2, 0
    return used


@fails(
    "scales",
    "The scale never changes.",
)
def wrong_keeps_its_scale(weight, optimizer, losses, scale, interval):
    for loss in losses:
        optimizer.zero_grad()
        (loss() * scale).backward()
        weight.grad /= scale
        if weight.grad.isfinite().all():
            optimizer.step()
    return [scale] * len(losses)


@fails(
    "scales",
    "After an overflow the count of good steps starts again at zero.",
)
def wrong_counts_on_after_an_overflow(weight, optimizer, losses, scale, interval):
    """Good steps in a row are asked for, not good steps."""
    used, good = [], 0
    for loss in losses:
        optimizer.zero_grad()
        (loss() * scale).backward()
        used.append(scale)
        weight.grad /= scale
        if weight.grad.isfinite().all():
            optimizer.step()
            good += 1
            if good % interval == 0:
                scale *= 2
        else:
            scale /= 2
    return used


@fails(
    "weights",
    "The optimizer steps although a gradient is not finite: skip that step.",
)
def wrong_steps_anyway(weight, optimizer, losses, scale, interval):
    return _with(weight, optimizer, losses, scale, interval, always=True)


@fails(
    "weights",
    "What overflowed was replaced, and momentum moved the weight: skip the step.",
)
def wrong_replaces_what_overflowed(weight, optimizer, losses, scale, interval):
    """Momentum moves the weights even where the gradient is zero."""
    return _with(weight, optimizer, losses, scale, interval, always=True, mend=True)


@fails(
    "weights",
    "The gradient is not divided by the scale before the step.",
)
def wrong_forgets_to_divide(weight, optimizer, losses, scale, interval):
    return _with(weight, optimizer, losses, scale, interval, divide=False)


@fails(
    "weights",
    "Scaled after backward, when small gradients were lost: scale the loss.",
)
def wrong_scales_what_is_lost_already(weight, optimizer, losses, scale, interval):
    """After backward it is too late: what has become zero stays zero."""
    return _with(weight, optimizer, losses, scale, interval, late=True)


def _with(
    weight, optimizer, losses, scale, interval, always=False, mend=False, divide=True, late=False
):
    used, good = [], 0
    for loss in losses:
        optimizer.zero_grad()
        (loss() * scale).backward()
        used.append(scale)
        is_good = (weight.grad / scale).isfinite().all()
        if late:
            weight.grad = (weight.grad / scale).half().float()  # as if it had come back unscaled
        elif divide:
            weight.grad /= scale
        if mend:
            weight.grad.nan_to_num_(0.0, 0.0, 0.0)
        if is_good or always:
            optimizer.step()
        good = good + 1 if is_good else 0
        scale = scale / 2 if not is_good else scale
        if good == interval:
            scale, good = scale * 2, 0
    return used


def _scaled(weight, optimizer, losses, scale, interval, is_good, starts_anew=True):
    """The answer, with another test of a good step, or a count that goes on after growth."""
    used, good = [], 0
    for loss in losses:
        optimizer.zero_grad()
        (loss() * scale).backward()
        used.append(scale)
        weight.grad /= scale
        if is_good(weight.grad):
            optimizer.step()
            good += 1
            if good == interval:
                scale, good = scale * 2, 0 if starts_anew else good
        else:
            scale, good = scale / 2, 0
    return used


@fails(
    "scales",
    "NaN counts as an overflow, too: ask isfinite, which refuses both.",
)
def wrong_looks_for_infinity_only(weight, optimizer, losses, scale, interval):
    arguments = weight, optimizer, losses, scale, interval
    return _scaled(*arguments, lambda grad: not grad.isinf().any())


@fails(
    "scales",
    "After growth the count of good steps starts again at zero.",
)
def wrong_grows_once(weight, optimizer, losses, scale, interval):
    arguments = weight, optimizer, losses, scale, interval
    return _scaled(*arguments, lambda grad: grad.isfinite().all(), starts_anew=False)


@fails(
    "scales",
    "Noted after it had changed: append the scale that this step used.",
)
def wrong_notes_the_next_scale(weight, optimizer, losses, scale, interval):
    used = solution(weight, optimizer, losses, scale, interval)
    return [*used[1:], used[-1]]


@fails(
    "scales",
    "Gradients pile up from step to step: zero_grad() before each backward.",
)
def wrong_lets_gradients_pile_up(weight, optimizer, losses, scale, interval):
    used, good = [], 0
    for loss in losses:
        (loss() * scale).backward()
        used.append(scale)
        weight.grad /= scale
        if weight.grad.isfinite().all():
            optimizer.step()
            good += 1
            if good == interval:
                scale, good = scale * 2, 0
        else:
            scale, good = scale / 2, 0
    return used


@fails(
    "scales",
    "Doubled one step late: as soon as there are `interval` good steps.",
)
def wrong_grows_a_step_late(weight, optimizer, losses, scale, interval):
    return solution(weight, optimizer, losses, scale, interval + 1)


@fails(
    "scales",
    "The loss may be finite where its gradient is not: ask weight.grad.",
)
def wrong_asks_the_loss(weight, optimizer, losses, scale, interval):
    used, good = [], 0
    for loss in losses:
        optimizer.zero_grad()
        scaled = loss() * scale
        scaled.backward()
        used.append(scale)
        weight.grad /= scale
        if scaled.isfinite():
            optimizer.step()
            good += 1
            if good == interval:
                scale, good = scale * 2, 0
        else:
            scale, good = scale / 2, 0
    return used
