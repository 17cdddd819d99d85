"""Problems from real clusters: a number to work out, and a check that knows the usual slips.

    check_number("P6.1", 16.6)   # right, or how far off, and why that may be; worked("P6.1")

The five problems of notebook 06 are five functions of ``notebooks/solutions/problems_6.py``:

    @problem("A title", unit="GB", source="[paper](link)", hint="...", slips={"Sentence.": 120.0})
    def weights_and_the_rest():
        \"\"\"The situation, its numbers, and the question: the text in the notebook.\"\"\"
        return sum(model_state(...).values()) / 1e9   # by the library's own formulas
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from IPython.display import Code

from minipar.lab import exercises
from minipar.lab.exercises import CheckFailed

FACTORS = {  # by the factor by which an answer is too large or too small
    8: "bits or bytes?",
    1.024**2: "steps of 1000 or of 1024?",
    1.024**3: "steps of 1000 or of 1024?",
    60: "seconds, minutes or hours?",
    3600: "seconds or hours?",
    100: "a share or per cent?",
    **{1000.0**n: "which prefix has the unit?" for n in range(1, 5)},
}


@dataclass(frozen=True)
class Problem:
    """A question. The answer is a number of `unit`, right within a share `within`."""

    title: str
    unit: str
    source: str
    hint: str
    slips: dict[str, float]  # likely wrong answers, by the sentence for them
    work: Callable[[], float]  # its docstring is the question
    within: float = 0.02
    lesson: str = ""

    @cached_property
    def right(self) -> float:
        return self.work()

    def why(self, answer: float) -> str:
        """Say how far off a wrong answer is, and which known slip looks like it."""
        for sentence, value in self.slips.items():
            if abs(answer - value) <= 0.005 * abs(value):
                return sentence
        if math.isnan(answer):
            return "It is no number."
        if answer <= 0:
            return "It is a number above zero."
        factor = max(answer / self.right, self.right / answer)
        size = "large" if answer > self.right else "small"
        for known, question in FACTORS.items():
            if abs(factor / known - 1) <= 0.005:
                return f"Exactly {known:.6g} times too {size}: {question}"
        far = f"{100 * (factor - 1):.2g} %" if factor < 1.5 else f"{factor:.2g} times"
        return f"About {far} too {size}."


def problem(title: str, **known: Any) -> Callable[[Callable[[], float]], Problem]:
    """Make a `Problem` of the function that works it out; its docstring is the question."""
    return lambda work: Problem(title, work=work, **known)


@cache
def problems(notebook: str) -> dict[str, Problem]:
    """Return the problems of a notebook, "6", by number: "P6.1"."""
    folder = next(iter(exercises.exercises().values())).parent
    files = folder.glob(f"problems_{notebook}.py")
    known = [p for file in files for p in vars(exercises.load(file)).values()]
    found = [p for p in known if isinstance(p, Problem)]
    return {f"P{notebook}.{count}": one for count, one in enumerate(found, 1)}


def _named(number: str) -> Problem:
    known = problems(number.removeprefix("P").split(".")[0])
    if number not in known:
        raise ValueError(f"there is no problem {number!r}; try one like P6.1")
    return known[number]


def check_number(number: str, answer: Any) -> None:
    """Say that `answer` is right, or raise `CheckFailed`, which says how far off it is, and why."""
    asked = _named(number)
    if answer is ...:
        todo = f"Put your number ({asked.unit}) in the place of the dots, and run this cell again."
        raise exercises.waiting(f"Problem {number}", asked.title, todo)
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise CheckFailed(f"{answer!r} is no number; give it in {asked.unit}", "number") from None
    if not abs(value - asked.right) <= asked.within * asked.right:  # so that nan is wrong, too
        text = f"Problem {number}: not yet, {value:g} {asked.unit}. {asked.why(value)}"
        raise CheckFailed(text, "number")
    shown = f"{asked.right:.4g}" if asked.right < 1000 else f"{asked.right:,.0f}"
    print(f"Problem {number} is right: {shown} {asked.unit}. {asked.lesson}".rstrip())


def worked(number: str) -> Code:
    """Return the stored solution, as highlighted source."""
    return Code(inspect.getsource(_named(number).work), language="python")
