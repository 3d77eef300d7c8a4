"""Makes docs/what-your-loop-may-do.md from the table: `scripts/idioms`."""

from __future__ import annotations

from pathlib import Path

from idioms.table import Category, Idiom, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "what-your-loop-may-do.md"

INTRODUCTION = """\
# What your training loop may do

<!-- Made by scripts/idioms from the table in tests/idioms. Change it there. -->

Each row below is a training loop in `tests/idioms`, written as its user writes it. If rows differ in the optimizer or the
model alone, one loop trains all of them side by side. A test runs the loop in replica groups. First the groups make some steps
without a death. Then a group dies in the middle of a step and comes back with other random weights. After each step the test
compares everything that the loop has registered, bit by bit, with a plain loop. The plain loop uses torch's own DDP and
optimizers, and no group dies in it.

Five rules are behind nearly all of these rows:

1. **The forward pass begins a step, `step` ends it.** Collectives between groups belong in between, the same ones in all groups.
   Lines after `zero_grad` that come before the forward pass belong to the step before. `zero_grad` itself begins a step only if
   the library sees no forward pass in your steps, because you do not use `DistributedDataParallel`.
2. **A step may be discarded.** Then it has not happened: weights and `manager.current_step()` stay, and what the forward pass
   and the loss have changed in the registered state goes back. Some lines after `step` belong to a step: they move a schedule,
   average the weights, or count. Run such lines only if `optimizer.step()` has returned True.
3. **Register every value that your loop remembers and computes with**, together with the model and the optimizer. A group
   that returns gets it.
4. **If all groups have to make the same decision, decide by a value that is the same in all groups**: the step, averaged
   gradients, an averaged loss.
5. **A group that returns loads the state at the end of an iteration that does not count.** `step()` is False there. So what the
   loop reads at the top of its next iteration is the others'. Ask `step()` whether a step counted, and not whether
   `current_step()` has moved: loading moves it, too. Finish what belongs to a step before you ask anything of the next. What the
   loop changes after a `step()` that was False goes back as its next step begins, and a warning names it.

In the tables, "yes" stands for bit-equal in all groups, with and without a death, if you do what the last column says. If that
is empty, write it as you would anywhere. "**No**" has the name of the error by which the library refuses the loop. If there is
no name, the last column says what happens, and the log has a warning, if anything can be seen.
"""

NOTES = {
    Category.RATE: """\
Give a scheduler to the Manager, and write the loop that you know. [The training loop](guides/training-loop.md) says more.

<!-- block: in open-step -->
```python
scheduler = manager.scheduler(CosineAnnealingLR(optimizer, 1000))
...
optimizer.step()
scheduler.step()  # does nothing where the step was discarded
```

Some schedulers do not move with each step. Register such a scheduler with model and optimizer, and step it only if the step
counted:

<!-- block: in open-step -->
```python
if optimizer.step() and manager.current_step() % 1000 == 0:
    scheduler.step()
```""",
    Category.DISCARDED: """\
A discarded step is undone in the registered state:

- What no optimizer trains goes back to what it was as the step's first forward pass began: tensors, numbers, lists and deques,
  in a module, an object, a dict or a variable of your script. Without `DistributedDataParallel` it is what it was in
  `zero_grad`.
- Weights go back to what they were in `zero_grad`, from the second step on in which your loop writes to them before the vote.
  In a new job they do from the first one.
- A number under another name than in the state does not go back, nor does what a class makes of itself only in `state_dict`.
  Keep such a value in a tensor, or change it only if the step counted.
- Random generators and the place in the data go on: the batch was read.
- If your loop itself skips a step before the vote (`continue`), nothing goes back. If a group comes in with that
  step, the step is discarded. If your loop clears gradients at the end of the iteration, and does not use
  `DistributedDataParallel` or skips more than one step in 16, it counts instead: that group may have computed it with the batch
  that was left out, and gets the others' place before the next one.""",
    Category.WEIGHTS: """\
Register averaged weights, and update them only if the step counted:

<!-- block: in open-step -->
```python
if optimizer.step():
    average.update_parameters(model)
```""",
}

WAS_WRONG = """\
## Loops that were wrong at first

"""


def text() -> str:
    """Return the page."""
    entries = table()
    right = [entry for entry in entries if entry.was == "right"]
    parts = [INTRODUCTION]
    parts += [_chapter(category, [entry for entry in entries if entry.category is category]) for category in Category]
    found = [f"- {entry.name}: {entry.was}{_still(entry)}" for entry in entries if entry.was != "right"]
    parts.append(
        WAS_WRONG
        + f"The tables have {len(entries)} rows. {len(right)} of them worked when they entered it. These did not work at first:"
        + "\n\n"
        + "\n".join(found)
        + "\n"
    )
    return "\n".join(parts)


def _chapter(category: Category, entries: list[Idiom]) -> str:
    lines = [f"## {category.value}", ""]
    if category in NOTES:
        lines += [NOTES[category], ""]
    rows = [f"| {_cell(entry.name)} | {_works(entry)} | {_cell(entry.know)} |" for entry in entries]
    return "\n".join([*lines, "| pattern | works | what to do |", "|---|---|---|", *rows, ""])


def _works(entry: Idiom) -> str:
    if entry.pending:
        return _cell(f"not yet: {entry.was if entry.was != 'right' else entry.pending}")
    if entry.is_forbidden:
        return f"**no**: `{entry.refused}`" if entry.refused else "**no**"
    return "with a warning" if entry.says else "yes"


def _still(entry: Idiom) -> str:
    return " (not mended yet)" if entry.pending else ""


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text())
