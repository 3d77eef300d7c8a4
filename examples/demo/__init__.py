"""The demo: a small GPT trains as several replica groups that are killed and come back, on real text.

| module          | what it is                                                                              |
|-----------------|-----------------------------------------------------------------------------------------|
| `cli`           | the options, and the order of things: train, report, exit code                          |
| `supervisor`    | the run: has the launcher start the groups, kills them, tells them where to end           |
| `chaos`         | decides which group is killed when; pure                                                |
| `timeline`      | what happened, and the figures that follow from it; pure                                |
| `display`       | live progress                                                                           |
| `report`, `plot`| the table, the JSON file, the picture                                                   |
| `worker`        | one replica group: the training loop, the only module that uses the whole library       |
| `events`, `lines` | what a worker tells the supervisor, and how that is read while it grows               |
| `model`, `corpus`, `digest` | the GPT, its text, the fingerprint of a training state                      |

Only `worker`, `model` and `digest` import torch: the supervisor starts in a blink.
"""
