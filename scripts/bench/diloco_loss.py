"""Compares the loss after equal tokens with data-parallel training's.

Bars: within 2 % of it with no failure, within 3 % with a SIGKILL every 30 s. The loss is that of the global parameters on text
that nobody trained on. Tokens count where they went into a committed round, over all groups: what a kill destroys is trained
again. All three trainings have the same model, batches, inner optimizer and learning rates.
"""

from __future__ import annotations

from diloco.figures import Summary, summarize

from bench.diloco_figures import excess, percent
from bench.diloco_jobs import DDP, DILOCO, arguments_of, options_of, run_job
from bench.run import Run
from bench.stats import judge_at_most, median
from bench.table import Row, Section, seconds

NAME = "loss"
TITLE = "Held-out loss after equal tokens, over data-parallel training's"
BAR = 0.02
BAR_WITH_KILLS = 0.03
KILL_EVERY_S = 30.0


def measure(run: Run) -> Section:
    """Run the three trainings, and judge how far the losses of two lie above the third's."""
    kill_every_s = 10.0 if run.quick else KILL_EVERY_S
    arguments = arguments_of(
        groups=2,
        inner_steps=4000 if run.quick else 12000,
        width=32,
        blocks=2,
        context=32,
        batch_size=16,
        learning_rate=4e-3,
        sync_every=40,
        fragments=2,
        delay=3,
        alpha=0.5,
        kills=0,
        seed=run.seed,
    )
    found: dict[str, list[Summary]] = {"ddp": [], "diloco": [], "killed": []}
    for number in range(run.num_repeats(1, 1)):
        found["ddp"].append(summarize(run_job(run, f"ddp-{number}", DDP, arguments)))
        found["diloco"].append(summarize(run_job(run, f"diloco-{number}", DILOCO, arguments)))
        killed = run_job(run, f"killed-{number}", DILOCO, arguments, kill_every_s=kill_every_s)
        found["killed"].append(summarize(killed))
    pairs = {
        name: [excess(one.held_out_loss, ddp.held_out_loss) for one, ddp in zip(found[name], found["ddp"], strict=True)]
        for name in ("diloco", "killed")
    }
    num_kills = "+".join(str(one.num_kills) for one in found["killed"])
    bars = {
        "diloco": ("no failure", BAR),
        "killed": (f"a SIGKILL every {kill_every_s:.0f} s ({num_kills})", BAR_WITH_KILLS),
    }
    rows = []
    for name, (title, bar) in bars.items():
        figure = median(pairs[name])
        is_sound = all(one.is_equal for one in found[name])
        rows.append(
            Row(
                figure=f"  {title}",
                ours=percent(figure) if is_sound else "groups differ",
                bar=f"<= {bar:+.0%}",
                verdict=judge_at_most(figure if is_sound else 1.0, bar),
            )
        )
    for name, title in (("ddp", "data-parallel"), ("diloco", "DiLoCo"), ("killed", "DiLoCo with kills")):
        losses = ", ".join(f"{one.held_out_loss:.4f}" for one in found[name])
        took = seconds(median([one.took_s for one in found[name]]))
        rows.append(Row(figure=f"    {title}: nats a character, training time", ours=f"{losses}, {took}"))
    options = options_of(arguments)
    tokens = found["ddp"][0].num_counted * options.characters_a_step
    notes = [
        f"{options.groups} groups, the demo's GPT of width {options.width}, {tokens / 1e6:.1f} million characters of Python's "
        f"standard library, {options.fragments} fragments every {options.sync_every} steps, delay {options.delay}, loopback",
    ]
    raw = {
        name: [
            {
                "held_out_loss": one.held_out_loss,
                "num_counted": one.num_counted,
                "num_kills": one.num_kills,
                "took_s": one.took_s,
                "is_equal": one.is_equal,
            }
            for one in summaries
        ]
        for name, summaries in found.items()
    }
    return Section(name=NAME, title=TITLE, rows=rows, notes=notes, raw=raw)
