"""The metrics of a lighthouse and of groups: their names, labels, and what they say. Who serves them says how much each is.

Labels take few values: `job` and `group` are the names that users gave, never what tells two lives of a group apart. The others
are of `CAUSES`, `Phase`, `Account`, and the outcomes of saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Values: TypeAlias = Mapping[tuple[str, ...], float]
"""By the values of the labels, in their order."""
Samples: TypeAlias = Mapping[str, Values]
"""By metric."""

BUILD = {"build_info": ("version protocol", "1; the versions of the package and of its protocol.")}
OF_LIGHTHOUSE = BUILD | {
    "lighthouse_leads": ("", "1 if this lighthouse decides; 0 if it stands by for another one."),
    "job_groups": ("job", "Replica groups that are connected."),
    "job_participants": ("job", "Replica groups that are in the last quorum."),
    "job_step": ("job", "Steps that the newest state has made."),
    "job_quorum_id": ("job", "The number of the last quorum."),
    "job_quorum_age_seconds": ("job", "For how long the job has had its last quorum."),
    "job_steps_committed_total": ("job", "Steps that counted, since this lighthouse leads."),
    "job_steps_discarded_total": ("job cause", "Steps that did not count, by cause."),
    "job_waited_for_seconds_total": (
        "job group phase",
        "How long the others waited for a group, by where it was late.",
    ),
}
OF_GROUP = BUILD | {
    "step": ("job group", "Steps that the state of this group has made."),
    "quorum_id": ("job group", "The number of the quorum of its last step."),
    "quorum_age_seconds": ("job group", "For how long it has trained in that."),
    "steps_committed_total": ("job group", "Steps of this process that counted."),
    "steps_discarded_total": ("job group cause", "Steps of this process that did not count, by cause."),
    "ledger_seconds_total": ("job group account", "What the training thread spent its time on, but for the open step."),
    "phase_seconds_total": ("job group phase", "How long it was in each phase of its steps, computing or waiting."),
    "heals_total": ("job group", "States of other groups that were loaded."),
    "heal_bytes_total": ("job group", "What was received of them."),
    "heal_seconds_total": ("job group", "How long that took."),
    "saves_total": (
        "job group outcome",
        "Saves that this rank has begun and that have ended, by outcome: saved, failed.",
    ),
}
METRICS: Mapping[str, tuple[str, str]] = OF_LIGHTHOUSE | OF_GROUP
"""By name, after `torchft_ckpt_`: the labels, and what it says. Those that end with `_total` are counters."""
